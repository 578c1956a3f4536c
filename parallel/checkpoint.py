"""When a run writes checkpoints, what goes into them, and how it goes on from one under whatever layout it has now."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from conf.schema import Config
from parallel import checkpoint_files as files
from parallel import checkpoint_io as io
from parallel import checkpoint_rules, frozen, rank_process
from parallel import checkpoint_state as state
from parallel.checkpoint_agree import of_first_rank, verify
from parallel.checkpoint_files import BadCheckpoint

LAYOUT = ("tp", "pp", "vpp", "cp", "dp", "sequence_parallel", "zero")


class Checkpoints:
    """Checkpoints of one run; every rank has one and calls the same methods at the same step."""

    def __init__(self, cfg: Config, run_dir: Path, chunks, optimizer, schedule, clipper):
        self.cfg, self.run_dir = cfg, Path(run_dir)
        self.chunks, self.optimizer, self.schedule, self.clipper = chunks, optimizer, schedule, clipper
        self.notes: dict[str, str] = {}  # where the run goes on from, for the block before the first step
        # A rank that stops in the middle of a step has no state that fits those of the others.
        self._stop_asked = rank_process.stop_between_steps() if cfg.checkpoint.every else None

    def resume(self) -> int:
        """Go on from the checkpoint that `checkpoint.resume` means; the steps that are done already.

        Raises BadCheckpoint on all ranks alike, with a sentence that names the file.
        """
        wanted = self.cfg.checkpoint.resume
        found = of_first_rank(lambda: files.find(wanted, self.run_dir) if wanted else None)
        if found is None:
            if wanted:
                self.notes = {"resumed": "no: checkpoint.resume=auto found no checkpoint in this run's folder"}
            return 0
        return self._load(found)

    def roll_back(self) -> Iterator[int]:
        """Load the checkpoints in this run's own folder again, the newest first; the steps that are done in each."""
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
        self.clipper.norms.clear()
        self.clipper.norms.extend(about.get("recent_norms", []))
        self.schedule.num_steps = about["step"]  # the rest of it is a function of the configuration
        self.notes = {"resumed": "after " + self._told(found, about, same_layout)}
        return about["step"]

    def after(self, step: int) -> None:
        """To be called after every step: write a checkpoint when it is due, and before a stop that was asked for.

        Raises rank_process.Stopped when a signal asked any rank to stop.
        """
        every, last = self.cfg.checkpoint.every, step == self.cfg.train.steps
        if not every:
            return
        signum = torch.tensor([self._stop_asked()], dtype=torch.long, device="cuda")
        dist.all_reduce(signum, dist.ReduceOp.MAX)
        if signum.item() or last or step % every == 0:
            self.save(step)
        if signum.item():
            raise rank_process.Stopped(int(signum))
        if last:
            rank_process.stop_at_once()

    def save(self, step: int) -> None:
        """Write the checkpoint after `step` steps. Raises BadCheckpoint on all ranks when the disk does not take it."""
        rank, folder = dist.get_rank(), self.run_dir / files.FOLDER
        unfinished = folder / f"{files.UNFINISHED}{files.name_of(step)}"
        _together(lambda: files.begin(folder, step) if rank == 0 else None, folder)
        tensors = state.tensors(self.chunks, self.optimizer, self.cfg) | _by_rank(state.generators())
        updates = state.updates(self.chunks, self.optimizer, self.cfg.parallel.zero)

        def write():
            io.save(unfinished, tensors)
            return {path.name: files.fingerprint(path) for path in unfinished.glob(f"__{rank}_*.distcp")}

        known = {name: about for part in _together(write, unfinished) for name, about in part.items()}

        def finish():
            if rank:
                return
            shutil.copyfile(self.run_dir / frozen.FILE, unfinished / frozen.FILE)
            for name in (io.INDEX, frozen.FILE):
                known[name] = files.fingerprint(unfinished / name)
            files.commit(unfinished, self._about(step, updates) | {"files": known}, self.cfg.checkpoint.keep)

        _together(finish, unfinished)

    def _about(self, step: int, updates: int) -> dict:
        train, wandb = self.cfg.train, self.run_dir / "wandb.json"
        return {
            "step": step,
            "tokens": step * train.global_batch * train.seq_len,
            # The order of samples is a function of (seed, index), so this number is the whole data position.
            "samples": step * train.global_batch,
            "updates": updates,
            "loss_scale": state.loss_scale(self.optimizer),
            "recent_norms": list(self.clipper.norms),
            "layout": self._layout(),
            "world_size": dist.get_world_size(),
            **checkpoint_rules.fixed(self.cfg),
            "precision": str(self.cfg.precision.name),
            "wandb_id": json.loads(wandb.read_bytes()).get("id") if wandb.exists() else None,
            "torch": torch.__version__,
        }

    def _layout(self) -> dict:
        return {name: getattr(self.cfg.parallel, name) for name in LAYOUT}

    def _told(self, found: Path, about: dict, same_layout: bool) -> str:
        words = [f"step {about['step']:,} of {os.path.relpath(found)}"]
        if not same_layout:
            sizes = {name: size for name, size in about["layout"].items() if size not in (1, 0, False)}
            was = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "one process"
            words.append(f"written under {was}")
            if self.cfg.model.dropout:
                words.append("dropout draws other numbers than there")
        if about["loss_scale"] is None and state.loss_scale(self.optimizer) is not None:
            words.append("which has no loss scale, so that it starts anew")
        return ", ".join(words)


def _by_rank(generators: dict[str, torch.Tensor]) -> dict[str, state.Pieces]:
    rank = dist.get_rank()
    return {
        f"generators/{rank}/{name}": state.Pieces(tuple(held.shape), [state.Piece((0,), held, True)])
        for name, held in generators.items()
    }


def _together(do, path: Path) -> list:
    """Run something on every rank and gather what it returns; one rank's trouble with the disk is everybody's."""
    result = problem = None
    try:
        result = do()
    except OSError as error:
        problem = f"{error.filename or path} cannot be written: {error.strerror or error}"
    except dist.checkpoint.api.CheckpointException as error:
        problem = f"{path} cannot be written: {str(error).strip().splitlines()[-1]}"
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, (result, problem))
    problem = next((problem for _, problem in told if problem), None)
    if problem:
        raise BadCheckpoint(f"No checkpoint was written: {problem}.")
    return [result for result, _ in told]
