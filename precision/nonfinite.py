"""What a run does about a loss or gradient that is not finite: find the first bad tensor, save the batch, say why.

While all is finite this costs a comparison and a line of history a step. Loss and gradient norm are the same on every
rank, so all ranks come here together.
"""

import math
import os
import signal
from collections import deque
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from conf.schema import Config, OnNan
from optim.clip import Update
from parallel import checkpoint_files, rank_process
from precision import diagnosis, first_bad
from tracking import result
from tracking.result import DOCTOR

HISTORY = 128
HOPELESS = 5  # steps skipped in a row at a loss scale that does not fall any more


class BadBatch(ValueError):
    """A batch that must not reach a device; the message says what is wrong with it and where."""

    is_sentence = True  # a traceback would add nothing


class Doctor:
    """Looks after one run; every rank has one and calls the same methods in the same step."""

    def __init__(self, cfg: Config, run_dir: Path, chunks, optimizer, checkpoints):
        self.cfg, self.run_dir = cfg, Path(run_dir)
        self.chunks, self.optimizer, self.checkpoints = chunks, optimizer, checkpoints
        self.history: deque[tuple] = deque(maxlen=HISTORY)
        self.skipped_in_a_row = 0
        self.batch: list[np.ndarray] = []
        self.left_out: set[int] = set()  # steps whose batch is not used, whatever it computes to
        self.rollbacks = 0

    def take(self, step: int, micro_batches: list[np.ndarray]) -> None:
        """Keep the step's batch in mind; raises BadBatch for a token id that the model does not know."""
        self.step, self.batch = step, micro_batches
        vocab = self.cfg.model.vocab
        for number, tokens in enumerate(micro_batches):
            # On a GPU it would be an illegal address or an assertion somewhere later, on tensor-parallel ranks nothing.
            # Read without its sign, a negative number is a very large one: one pass over the batch is enough.
            if tokens.view(np.uint64).max() >= vocab:
                self._refuse(number, tokens, vocab)

    def _refuse(self, number: int, tokens: np.ndarray, vocab: int):
        sequence, position = np.argwhere((tokens < 0) | (tokens >= vocab))[0]
        rank = dist.get_rank()
        folder = self.run_dir / DOCTOR
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"batch-rank{rank}.npy", np.concatenate(self.batch))
        raise BadBatch(
            f"the batch of step {self.step} has token id {tokens[sequence, position]} outside 0..{vocab - 1} "
            f"(model.vocab={vocab}) on rank {rank}, micro-batch {number}, sequence {sequence}, position {position}: "
            f"the data was made with another tokenizer, or is damaged (saved as {DOCTOR}/batch-rank{rank}.npy)"
        )

    def finds(self, loss: float, update: Update, lr: float, scale: float) -> str | None:
        """What is wrong with this step in words, None when nothing is or the loss scaler handles it."""
        self.history.append((self.step, loss, update.grad_norm, lr, scale))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if update.skipped else 0
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if update.skipped:
            return "the gradient overflows" if self._at_floor(scale) else None
        return None if math.isfinite(update.grad_norm) else f"the gradient norm is {update.grad_norm}"

    def _at_floor(self, scale: float) -> bool:
        p = self.cfg.precision
        lowest = scale <= p.min_loss_scale if p.loss_scale == "dynamic" else True
        return lowest and self.skipped_in_a_row >= HOPELESS

    def treat(self, seen: str) -> int:
        """Find out, write doctor/, and do what train.on_nan says; the step after which to go on.

        It is this step when the step is left out, and an earlier one after a rollback. Raises FloatingPointError, on
        all ranks, when the run ends here.
        """
        report = diagnosis.diagnose(self._measure(seen), self.cfg)
        self._save(report)
        wanted, limit = self.cfg.train.on_nan, self.cfg.train.nan_limit
        why = None
        if wanted is not OnNan.stop and len(self.left_out) >= limit:
            why = f"train.nan_limit={limit} steps were left out before"
        elif wanted is OnNan.skip and report["bad_state"]:
            why = "leaving the step out cannot help"
        elif wanted is not OnNan.stop:
            self.left_out.add(self.step)
            self.skipped_in_a_row = 0
            if wanted is OnNan.skip:
                return self.step
            if (done := self._roll_back(report)) is not None:
                return done
            why = "there is no checkpoint to go back to that is finite"
        self._end(report, why)

    def _roll_back(self, report: dict) -> int | None:
        if report["bad_state"] and self.step > 1:  # the update before this step did it
            self.left_out.add(self.step - 1)
        for done in self.checkpoints.roll_back():
            if not first_bad.kept(self.chunks, self.optimizer, self.cfg.parallel.zero)["bad"]:
                self.rollbacks += 1
                return done
        return None

    def _end(self, report: dict, why: str | None):
        for signum in rank_process.STOP_SIGNALS:  # other ranks end too, and rank 0 still has to close everything
            signal.signal(signum, signal.SIG_IGN)
        error = FloatingPointError(report["cause"] + (f"; {why}" if why else ""))
        error.is_sentence = True  # a traceback would add nothing
        raise error

    def _measure(self, seen: str) -> dict:
        cfg, zero = self.cfg, self.cfg.parallel.zero
        dynamic = cfg.precision.loss_scale == "dynamic"
        _, _, _, lr, scale = self.history[-1]
        at_floor = seen == "the gradient overflows"
        reduced = first_bad.gradients(self.chunks, zero)
        kept = first_bad.kept(self.chunks, self.optimizer, zero)
        first = first_bad.find(self.chunks, self.batch, cfg.train, self._clear)
        batch, tokens = self._whole_batch()
        before = list(self.history)[:-1]
        return {
            "step": self.step,
            "seen": seen,
            "first": _first(first, kept["bad"], reduced),
            "reproduced": first is not None,
            "bad_state": kept["bad"],
            "largest_weight": kept["largest"],
            "spread": kept["spread"],
            "history": {
                "step": [entry[0] for entry in before],
                "loss": [entry[1] for entry in before],
                "grad_norm": [entry[2] for entry in before],
                "lr": [entry[3] for entry in before],
                "loss_scale": [entry[4] for entry in before],
            },
            "lr": lr,
            "loss_scale": {
                "kind": "none" if cfg.precision.loss_scale == "none" else "dynamic" if dynamic else "fixed",
                "now": scale,
                "floor": cfg.precision.min_loss_scale,
                "skipped_in_a_row": self.skipped_in_a_row,
            },
            "at_floor": at_floor,
            "tokens": tokens,
            "checkpoint": self._newest(),
            "layout": {name: getattr(cfg.parallel, name) for name in ("tp", "pp", "vpp", "cp", "dp", "zero")},
            "batch": batch,
        }

    def _clear(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _whole_batch(self) -> tuple[str, dict]:
        """Save the global batch; its file, and what its token ids are like."""
        tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        first = tp == pp == parallel_state.get_context_parallel_rank() == 0
        mine = (parallel_state.get_data_parallel_rank(), np.concatenate(self.batch)) if first else None
        parts = sorted((part for part in first_bad.everywhere(mine) if part), key=lambda part: part[0])
        batch = np.concatenate([part for _, part in parts])
        folder = self.run_dir / DOCTOR
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / diagnosis.BATCH, batch)
        return f"{DOCTOR}/{diagnosis.BATCH}", _tokens(batch, self.cfg.model.vocab)

    def _newest(self) -> str | None:
        newest = checkpoint_files.latest(self.run_dir / checkpoint_files.FOLDER) if dist.get_rank() == 0 else None
        return first_bad.everywhere(os.path.relpath(newest) if newest else None)[0]

    def _save(self, report: dict) -> None:
        if dist.get_rank():
            return
        result.write(self.run_dir / DOCTOR, diagnosis.REPORT, **report)
        (self.run_dir / DOCTOR / diagnosis.REPORT).with_suffix(".md").write_text(diagnosis.markdown(report))


def _first(found: dict | None, bad_state: list[dict], reduced: list[dict]) -> dict | None:
    """The first bad tensor of all: what was bad between two steps comes before what the pass finds."""
    weights = [entry for entry in bad_state if entry["state"] == "weights"]
    moments = [entry for entry in bad_state if entry["state"] != "weights"]
    if moments:
        return _lasting("optimizer", moments[0])
    if weights and (not found or found["direction"] == "forward"):
        return _lasting("weights", weights[0])
    if found and found["kind"].startswith(first_bad.HELD) and found["direction"] == "forward":
        return found | {"direction": "weights", "micro_batch": None, "master_is_good": True}
    if not found and reduced:
        name = reduced[0]["name"]
        return {"direction": "gone", "module": name.rpartition(".")[0], "tensor": f"gradient of {name}"} | reduced[0]
    return found


def _lasting(direction: str, entry: dict) -> dict:
    what = entry["name"] if entry["state"] == "weights" else f"{entry['state']} of {entry['name']}"
    return {"direction": direction, "module": entry["name"].rpartition(".")[0], "tensor": what} | entry


def _tokens(batch: np.ndarray, vocab: int) -> dict:
    flat = batch.reshape(-1)
    changes = np.flatnonzero(np.diff(flat, prepend=flat[0] - 1, append=flat[-1] - 1))
    _, counts = np.unique(flat, return_counts=True)
    return {
        "min": int(flat.min()),
        "max": int(flat.max()),
        "vocab": vocab,
        "bad": int(((flat < 0) | (flat >= vocab)).sum()),
        "commonest": float(counts.max() / flat.size),
        "longest_run": int(np.diff(changes).max()),
    }
