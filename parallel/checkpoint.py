"""When a run writes checkpoints, what goes into them, and how it goes on from one under whatever layout it has now."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from conf.schema import Config
from parallel import checkpoint_files as files
from parallel import checkpoint_io as io
from parallel import checkpoint_rules, rank_process
from parallel import checkpoint_state as state
from parallel.checkpoint_agree import of_first_rank, verify
from parallel.checkpoint_files import BadCheckpoint
from parallel.checkpoint_write import Writer
from tracking import result, wandb_run

LAYOUT = ("tp", "pp", "vpp", "cp", "dp", "sequence_parallel", "zero")


class Checkpoints:
    """Checkpoints of one run; every rank has one and calls the same methods at the same step.

    As a context manager around the training loop: a run that fails leaves its last checkpoint complete.
    `data` is the fingerprint of what the run trains on, None where no data is at hand.
    """

    def __init__(self, cfg: Config, run_dir: Path, chunks, optimizer, schedule, clipper, data: str | None = None):
        self.cfg, self.run_dir, self.data = cfg, Path(run_dir), data
        self.chunks, self.optimizer, self.schedule, self.clipper = chunks, optimizer, schedule, clipper
        self.notes: dict[str, str] = {}  # for the block before the first step
        self.resumed: dict | None = None  # what the run goes on from, for the tracker
        if cfg.checkpoint.every:
            size = state.bytes_to_write(chunks, optimizer, cfg)
            self.writer = Writer(self.run_dir, cfg.checkpoint.keep, cfg.checkpoint.asynchronous, size)
            self.notes["checkpoints"] = f"every {cfg.checkpoint.every:,} steps, {self.writer.note}"
            # A rank that stops in the middle of a step has no state that fits those of the others.
            self._stop_asked = rank_process.stop_between_steps()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if self.cfg.checkpoint.every and isinstance(error, Exception):
            self.writer.settle(rank_process.LAST_STEP_S)

    def resume(self) -> int:
        """Go on from the checkpoint that `checkpoint.resume` means; the steps that are done already.

        Raises BadCheckpoint on all ranks alike, with a sentence that names the file.
        """
        wanted = self.cfg.checkpoint.resume
        found = of_first_rank(lambda: files.find(wanted, self.run_dir) if wanted else None)
        if found is None:
            if wanted:
                self.notes["resumed"] = "no: checkpoint.resume=auto found no checkpoint in this run's folder"
            return 0
        return self._load(found)

    def roll_back(self) -> Iterator[int]:
        """Load the checkpoints in this run's own folder again, the newest first; the steps that are done in each."""
        if self.cfg.checkpoint.every:
            self.writer.finish()
        for found in reversed(of_first_rank(lambda: files.complete(self.run_dir / files.FOLDER))):
            yield self._load(found)

    def _load(self, found: Path) -> int:
        about = files.read_about(found)
        if unfit := checkpoint_rules.unfit(found, about, self.cfg):
            raise BadCheckpoint(" ".join(unfit))
        verify(found, about)
        tensors = state.tensors(self.chunks, self.optimizer, self.cfg)
        same_layout = about["layout"] == self._layout()
        generators = state.generators()
        if same_layout:
            tensors |= _by_rank(generators)
        io.load(found, tensors)
        if same_layout:
            state.set_generators(generators)
        state.set_updates(self.chunks, self.optimizer, self.cfg, about["updates"])
        state.install_masters(self.chunks, self.optimizer, self.cfg.parallel.zero)
        if about["loss_scale"] is not None:
            state.set_loss_scale(self.optimizer, about["loss_scale"])
        self.clipper.norms.clear()
        self.clipper.norms.extend(about.get("recent_norms", []))
        self.schedule.num_steps = about["step"]  # the rest of it is a function of the configuration
        self.notes["resumed"] = "after " + self._told(found, about, same_layout)
        kept = {name: about.get(name) for name in ("wandb_id", "parent")}
        self.resumed = kept | {"checkpoint": str(found.resolve())}
        return about["step"]

    def after(self, step: int) -> None:
        """To be called after every step: save when it is due, and before a stop that was asked for.

        Raises rank_process.Stopped when a signal asked any rank to stop, BadCheckpoint when the disk does not take one.
        """
        every, last = self.cfg.checkpoint.every, step == self.cfg.train.steps
        if not every:
            return
        told = torch.tensor([self._stop_asked(), self.writer.failed()], dtype=torch.long, device="cuda")
        dist.all_reduce(told, dist.ReduceOp.MAX)
        signum, failed = told.tolist()
        if failed:
            self.writer.finish()
        if signum or last or step % every == 0:
            self.save(step)
        if signum:
            self.writer.finish()
            raise rank_process.Stopped(signum)
        if last:
            self.writer.finish()
            rank_process.stop_at_once()

    def save(self, step: int) -> None:
        """Begin to write the checkpoint after `step` steps; `writer.finish()` waits until it is complete."""
        tensors = state.tensors(self.chunks, self.optimizer, self.cfg) | _by_rank(state.generators())
        self.writer.start(step, tensors, self._about(step))

    def _about(self, step: int) -> dict:
        train = self.cfg.train
        return {
            "step": step,
            "tokens": step * train.global_batch * train.seq_len,
            # The order of samples is a function of (seed, index), so this number is the whole data position.
            "samples": step * train.global_batch,
            "updates": state.updates(self.chunks, self.optimizer, self.cfg.parallel.zero),
            "loss_scale": state.loss_scale(self.optimizer),
            "recent_norms": list(self.clipper.norms),
            "layout": self._layout(),
            "world_size": dist.get_world_size(),
            **checkpoint_rules.fixed(self.cfg),
            "precision": str(self.cfg.precision.name),
            "data": self.data,
            "wandb_id": result.load(self.run_dir, wandb_run.FILE).get("id"),
            "parent": result.load(self.run_dir, result.FACTS_FILE).get("parent"),
            "torch": torch.__version__,
        }

    def _layout(self) -> dict:
        return {name: getattr(self.cfg.parallel, name) for name in LAYOUT}

    def _told(self, found: Path, about: dict, same_layout: bool) -> str:
        words = [f"step {about['step']:,} of {os.path.relpath(found)}"]
        if not same_layout:
            sizes = {name: size for name, size in about["layout"].items() if size > (name != "zero")}
            was = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "one process"
            words.append(f"written under {was}")
            if self.cfg.model.dropout:
                words.append("dropout draws other numbers than there")
        was = about.get("data")
        if was and self.data and was != self.data:
            words.append(f"written on other data (fingerprint {was}, here {self.data})")
        was, now = about["precision"], str(self.cfg.precision.name)
        if was != now:
            words.append(f"written in {was}")
        scales = about["loss_scale"] is not None, state.loss_scale(self.optimizer) is not None
        if scales == (False, True):
            words.append("which has no loss scale, so that it starts anew")
        if scales == (True, False):
            words.append(f"whose loss scale of {about['loss_scale']['scale']:g} has no use here")
        return ", ".join(words)


def _by_rank(generators: dict[str, torch.Tensor]) -> dict[str, state.Pieces]:
    rank = dist.get_rank()
    return {
        f"generators/{rank}/{name}": state.Pieces(tuple(held.shape), [state.Piece((0,), held, True)])
        for name, held in generators.items()
    }
