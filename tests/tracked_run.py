"""A run without a model, for the tests of tracking: python tracked_run.py RUN_DIR STEPS STEP_S [END [DONE [FROM]]].

END is what happens after the last step: nothing, `raise`, `oom`, `nan`, `hang` (to be ended by a signal), `stuck` (in a
call that no signal interrupts, as a collective is whose peers are gone), `killed` (by SIGKILL, a second later),
`killed_at_once`, or `peer_killed` (the last rank; this one hangs). Ranks above 0 log nothing, as in train.py.
DONE steps are done already: the run goes on from a checkpoint of this folder, or of the W&B run FROM.
"""

import ctypes
import math
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel import rank_process
from parallel.frozen import load
from tracking.metrics import Meter
from tracking.mode import TrackingError
from tracking.result import load as load_json
from tracking.tracker import Tracker

FACTS = {
    "parameters": 1_234_567,
    "device": "Abacus 9",
    "peak": {"tflops": 2.0, "source": "dense BF16 peak of Abacus 9", "name": "dense BF16"},
    "rank_map": "rank 0: tp 0\nrank 1: tp 1",
    "run_command": "python train.py parallel=tp2",
    "data": {"source": "a book", "tokens": 1000, "val_tokens": 100, "fingerprint": "abc123"},
    "notes": {"memory": "1 of 8 GiB"},
}


def raw(step: int, step_s: float, tokens: int = 8192, loss: float | None = None) -> dict:
    """What train.py measures in a step."""
    facts = {"step": step, "tokens": step * tokens, "loss": loss or 1 + 4 / step, "lr": 1e-3, "grad_norm": 2.0}
    facts |= {"clip_coef": 0.5, "clipped": True, "loss_scale": 1.0, "skipped": False, "step_s": step_s}
    return facts | {"data_wait_s": step_s / 100, "peak_gib": 0.25}


def other_rank(run_dir: Path, steps: int, end: str) -> None:
    """A rank that does not log: waits for the last step, and is killed then or ends well."""
    file = run_dir / "metrics.jsonl"
    while not file.exists() or f'"step": {steps},' not in file.read_text():
        time.sleep(0.05)
    if end == "peer_killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while end.startswith(("hang", "killed")):
        time.sleep(0.05)


def main(run_dir: Path, steps: int, step_s: float, end: str, done: int = 0, wandb_id: str | None = None) -> None:
    if os.environ.get("RANK", "0") != "0":
        other_rank(run_dir, steps, end)
        return
    frozen = load(run_dir)
    meter = Meter(frozen.cfg, frozen.world_size, flops_per_token=1e6, peak_tflops=2.0)
    wandb_id = wandb_id or load_json(run_dir, "wandb.json").get("id")
    resumed = {"wandb_id": wandb_id, "parent": None, "checkpoint": f"/runs/step_{done}"} if done else None
    try:
        with Tracker(frozen, run_dir, FACTS | {"resumed": resumed}, done) as tracker:
            rank_process.last_words(tracker.last_words)
            if not done:
                tracker.log(0, {"val/loss": 5.5})
            for step in range(done + 1, steps + 1):
                time.sleep(step_s)
                tracker.log(step, meter.step(raw(step, step_s or 1e-3)))
            if end == "raise":
                raise ValueError("injected\nsecond line")
            if end == "oom":
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
            if end == "nan":
                tracker.log(steps + 1, {"val/loss": math.nan})
                return
            if end == "stuck":
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                ctypes.CDLL(None).sleep(60)
            if end in ("killed", "killed_at_once"):
                time.sleep(1.0 if end == "killed" else 0.0)
                os.kill(os.getpid(), signal.SIGKILL)
            while end in ("hang", "peer_killed"):
                time.sleep(0.05)
            tracker.log(steps, {"val/loss": 2.25})
            tracker.sample("def ", "f(x):\n    return x\n")
            tracker.verdict("This machine computes correctly.")
    except TrackingError as error:
        sys.exit(f"refused: {error}")


if __name__ == "__main__":
    words = dict(enumerate(sys.argv))
    numbers = int(words[2]), float(words[3]), words.get(4, ""), int(words.get(5, 0))
    rank_process.run(main, Path(words[1]), *numbers, words.get(6))
