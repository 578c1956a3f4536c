"""The parent of a run for the tests: `parallel.launch.run` with small ranks (launch_rank.py) instead of training.

Usage: launch_parent.py RUN_DIR SCENARIO WORLD_SIZE [TIMEOUT_S [GRACE_S]], with LAUNCH=srun in a SLURM allocation
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from conf.schema import Config, Device, LaunchKind
from parallel import launch, ranks
from parallel.heartbeat import Watch

run_dir, scenario, world_size, *rest = sys.argv[1:]
cfg = Config()
cfg.train.timeout_s = float(rest[0]) if rest else None
cfg.parallel.tp, cfg.parallel.cp, cfg.parallel.zero = int(world_size), 1, 0
cfg.train.micro_batch, cfg.parallel.pp, cfg.parallel.dp = 1, 1, 1
cfg.parallel.env = {"FROM_PARALLEL_ENV": "yes"}
cfg.launch.device, cfg.launch.kind = Device.cpu, LaunchKind(os.environ.get("LAUNCH", "local"))
if rest[1:]:
    ranks.GRACE_S = float(rest[1])
launch.Watch = lambda run_dir, world_size, quiet_s: Watch(run_dir, world_size, quiet_s=1.0)
entry = [sys.executable, "-u", str(Path(__file__).with_name("launch_rank.py")), scenario, run_dir]
try:
    launch.run(run_dir, SimpleNamespace(cfg=cfg, world_size=int(world_size)), entry)
except launch.JobFailed as failure:
    print(f"{failure.status}: {failure}", file=sys.stderr)
    sys.exit(1)
print("parent: done")
