"""The parent of a sweep for the tests: train.py's command line, with a stand-in for the ranks of a point.

How a point ends is decided by the learning rate that the test gives it. The files `started` and
`devices` tell of each start: world size and environment; GPUs, and the times between which the point had them.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from parallel.compose import command_line
from parallel.environment import rank_environment
from parallel.frozen import load
from tracking import result

ENDS = {0.5: "nan", 0.6: "oom", 0.7: "failed", 0.8: "timeout"}


def run(run_dir: Path, frozen) -> int:
    """Stands for train.start."""
    lr = frozen.cfg.optimizer.lr
    with open("started", "a") as file:
        connections = rank_environment(frozen.cfg, frozen.world_size)["CUDA_DEVICE_MAX_CONNECTIONS"]
        print(run_dir.name, frozen.world_size, connections, file=file)
    began = time.monotonic()
    if frozen.cfg.train.seed == 5:  # a point that takes its time
        time.sleep(0.7)
    with open("devices", "a") as file:
        print(os.environ.get("CUDA_VISIBLE_DEVICES"), began, time.monotonic(), file=file)
    if lr == 0.9:
        raise OSError("no ranks today")
    if lr == 0.25:
        time.sleep(1000)
    status = ENDS.get(lr, "ok")
    result.complete(run_dir, status, None if status == "ok" else f"made {status}")
    fields = result.load(run_dir) | {"val_loss_final": lr, "loss_final": 2 * lr}
    result.write(run_dir, **fields)
    return int(status != "ok")


if __name__ == "__main__":
    if sys.argv[1] == "--point":
        sys.exit(run(Path(sys.argv[2]), load(sys.argv[2])))
    sys.exit(command_line(run, sys.argv[1:]))
