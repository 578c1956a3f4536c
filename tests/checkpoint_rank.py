"""A rank that loads the checkpoint its run is told to go on from and writes it again, without a step in between."""

import sys
from pathlib import Path

from parallel import rank_process
from parallel.frozen import load


def main(run_dir: Path) -> None:
    """The rank of the run frozen in `run_dir`."""
    cfg = load(run_dir).cfg
    from optim import build
    from parallel import groups, wrap
    from parallel.checkpoint import Checkpoints

    chunks = wrap.model_chunks(cfg, groups.start(cfg))
    optimizer = build.optimizer(cfg, chunks)
    checkpoints = Checkpoints(cfg, run_dir, chunks, optimizer, build.schedule(cfg, optimizer))
    checkpoints.save(checkpoints.resume())
    groups.stop()


if __name__ == "__main__":
    rank_process.run(main, Path(sys.argv[1]))
