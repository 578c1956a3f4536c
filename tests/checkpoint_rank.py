"""A rank that loads the checkpoint its run is told to go on from and writes it again, without a step in between."""

import os
import sys
from pathlib import Path

from parallel import rank_process
from parallel.frozen import load
from parallel.heartbeat import Heartbeat


def main(run_dir: Path) -> None:
    """The rank of the run frozen in `run_dir`."""
    cfg, heartbeat = load(run_dir).cfg, Heartbeat(run_dir, int(os.environ["RANK"]))
    heartbeat.beat("import")
    from optim import build, clip
    from parallel import groups, wrap
    from parallel.checkpoint import Checkpoints

    heartbeat.beat("model")
    chunks = wrap.model_chunks(cfg, groups.start(cfg))
    optimizer = build.optimizer(cfg, chunks)
    schedule, clipper = build.schedule(cfg, optimizer), clip.Clipper(cfg, chunks, optimizer)
    checkpoints = Checkpoints(cfg, run_dir, chunks, optimizer, schedule, clipper)
    heartbeat.beat("checkpoint")
    checkpoints.save(checkpoints.resume())
    checkpoints.writer.finish()
    heartbeat.beat("end")
    groups.stop()


if __name__ == "__main__":
    rank_process.run(main, Path(sys.argv[1]))
