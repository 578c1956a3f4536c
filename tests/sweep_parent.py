"""The parent of a sweep for the tests: train.py's command line, with a stand-in for the ranks of a point.

How a point ends is decided by the learning rate that the test gives it. Each start is noted in the file `started`.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from parallel.compose import command_line
from tracking import result

ENDS = {0.5: "nan", 0.6: "oom", 0.7: "failed", 0.8: "timeout"}


def run(run_dir: Path, frozen) -> int:
    """Stands for train.start."""
    lr = frozen.cfg.optimizer.lr
    with open("started", "a") as file:
        print(run_dir.name, frozen.world_size, file=file)
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
    sys.exit(command_line(run, sys.argv[1:]))
