"""train.py with a fault in its ranks: python faulty_train.py FAULT [group=option ...] [key=value ...]

The process that is started behaves as train.py does; the ranks it starts come back here (--rank) with the fault.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from parallel import launch, rank_process
from parallel.compose import command_line

KEPT = []
RANK = os.environ.get("RANK")


def leak() -> None:
    """Something of every micro-batch is kept, 4 MiB of it."""
    import torch

    from models import loss

    mean = loss._mean

    def keeping(token_losses):
        KEPT.append(torch.ones(2**20))
        return mean(token_losses)

    loss._mean = keeping


def hang() -> None:
    """Rank 1 waits for data that does not come."""
    from data.batches import Batches

    step = Batches.step

    def slow(self, number):
        if RANK == "1" and number == 2:
            time.sleep(1000)
        return step(self, number)

    Batches.step = slow


def killed() -> None:
    """Rank 1 is killed in step 3."""
    from data.batches import Batches

    step = Batches.step

    def dies(self, number):
        if RANK == "1" and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, number)

    Batches.step = dies


def overflow() -> None:
    """The gradient of every step is too large for FP16."""
    from models import loss

    mean = loss._mean

    def steep(token_losses):
        shown, value = mean(token_losses)
        return shown * 1e6 - (shown * 1e6).detach() + shown.detach(), value

    loss._mean = steep


def bad_batch(spoil) -> None:
    from data.batches import Batches

    step = Batches.step

    def spoilt(self, number):
        micro_batches = step(self, number)
        if self.order.seed is not None and number == 2:
            spoil(micro_batches)
        return micro_batches

    Batches.step = spoilt


def bad_token() -> None:
    """A token id beyond the vocabulary in step 3, on rank 0."""

    def spoil(micro_batches):
        if RANK == "0":
            micro_batches[1][0, 5] = 300

    bad_batch(spoil)


def nan_in(steps) -> None:
    """The loss of these steps is NaN, whenever their batch is seen."""
    from megatron.core.models.gpt import GPTModel

    from precision.nonfinite import Doctor

    take, forward, state = Doctor.take, GPTModel.forward, {"step": 0}

    def taking(self, step, micro_batches):
        state["step"] = step
        return take(self, step, micro_batches)

    def spoilt(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        return out * float("nan") if self.training and self.post_process and state["step"] in steps else out

    Doctor.take, GPTModel.forward = taking, spoilt


def full_disk() -> None:
    """No checkpoint finds room."""
    import errno

    from parallel import checkpoint_files

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    checkpoint_files.write_synced = full


def moment() -> None:
    """One element of Adam's second moment is NaN after the update of step 4, the first time only."""
    import torch

    from parallel import checkpoint_state as state
    from precision.nonfinite import Doctor

    take, seen = Doctor.take, []

    def taking(self, step, micro_batches):
        if step == 5 and not seen and not seen.append(step):
            parts = state.owned(self.chunks, self.optimizer, self.cfg.parallel.zero)
            part = next(part for part in parts if part.places[0].key.endswith("linear_fc1.weight"))
            with torch.no_grad():
                state.local(part.rule.state[part.master]["exp_avg_sq"])[0] = float("nan")
        return take(self, step, micro_batches)

    Doctor.take = taking


FAULTS = {
    "none": lambda: None,
    "leak": leak,
    "hang": hang,
    "killed": killed,
    "overflow": overflow,
    "bad token": bad_token,
    "bad batch": lambda: nan_in([3]),
    "diverged": lambda: nan_in(range(3, 100)),
    "moment": moment,
    "full disk": full_disk,
}


def rank(fault: str, run_dir: Path) -> None:
    from parallel import quiet

    quiet.libraries()
    FAULTS[fault]()
    train.rank(run_dir)


if __name__ == "__main__":
    fault, *words = sys.argv[1:]
    if words[0] == "--rank":
        rank_process.run(rank, fault, Path(words[1]))
    else:
        run = launch.run

        def with_fault(run_dir, frozen, entry=None):
            run(run_dir, frozen, [sys.executable, "-u", __file__, fault, "--rank", str(Path(run_dir).resolve())])

        launch.run = with_fault
        sys.exit(command_line(train.start, words))
