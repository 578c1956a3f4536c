"""What looking for NaN and for growing memory costs a step in which all is well: python -m benchmarks.watching

Everything that train.py does for it is called as train.py calls it, apart from the training itself: the check of the
token ids, the comparison of loss and norm, the memory that is held, and two signs of life.
"""

import sys
import tempfile
import time
from types import SimpleNamespace

import numpy as np

from optim.clip import Update
from parallel import facts
from parallel.compose import check, compose
from parallel.heartbeat import Heartbeat
from precision.nonfinite import Doctor
from tracking.growth import Growth

STEPS = 5000
BATCHES = {"4 micro-batches of 2 × 256 tokens (make train)": (4, 2, 256), "16 of 1 × 8,192 tokens": (16, 1, 8192)}


def main() -> None:
    cfg = check(compose(["launch.device=cpu", "parallel=single"])[0])
    for name, (count, sequences, length) in BATCHES.items():
        batch = [np.random.default_rng(0).integers(0, 256, (sequences, length + 1)) for _ in range(count)]
        with tempfile.TemporaryDirectory() as folder:
            doctor = Doctor(cfg, folder, [], None, SimpleNamespace())
            growth, heartbeat = Growth(folder, 0, facts.room_bytes), Heartbeat(folder, 0)
            update = Update(grad_norm=1.0, clip_coef=1.0, skipped=False)
            began = time.perf_counter()
            for step in range(1, STEPS + 1):
                heartbeat.beat(f"step {step}, computing")
                doctor.take(step, batch)
                doctor.finds(2.5, update, 1e-3, 1.0)
                growth.add(step, facts.held_bytes(), STEPS)
            each = (time.perf_counter() - began) / STEPS
        print(f"{name}: {each * 1e6:.0f} µs a step, {each / 0.1:.3%} of a step of 0.1 s")


if __name__ == "__main__":
    sys.exit(main())
