"""Replay the batch on which a run went NaN: python -m precision.doctor RUN

Prints what the run found, then computes the saved batch again under the run's own layout, from its last checkpoint or,
without one, from its initial weights. A batch that fails there too points to data or code; one that passes fails only
together with the weights the run had come to.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from conf.schema import TrackingMode
from parallel import checkpoint_files, frozen, launch, rank_process
from precision import diagnosis
from precision.diagnosis import BATCH, REPORT
from tracking import result
from tracking.result import DOCTOR

REPLAY = "replay"


def main(argv: list[str]) -> int:
    """The exit code: 0 when the batch passes, 1 when it fails again, 2 when there is nothing to replay."""
    if len(argv) != 1:
        print("usage: python -m precision.doctor RUN_FOLDER", file=sys.stderr)
        return 2
    run_dir = Path(argv[0])
    try:
        point = frozen.load(run_dir)
        report = json.loads((run_dir / DOCTOR / REPORT).read_bytes())
        print(diagnosis.text(report))
    except frozen.BadFrozen as problem:
        print(problem, file=sys.stderr)
        return 2
    except FileNotFoundError:
        print(f"{run_dir / DOCTOR} holds no report: this run has met no loss or gradient that is not finite.")
        return 2
    except (ValueError, KeyError, TypeError) as problem:
        print(f"{run_dir / DOCTOR / REPORT} is damaged: {problem}", file=sys.stderr)
        return 2
    found = replay(run_dir, point)
    if isinstance(found, str):
        print(found, file=sys.stderr)
        return 2
    start, first = found["start"], found["first"]
    if first is None:
        print(f"\nReplayed from {start}: the batch passes. It fails only with the weights the run had come to.")
        return 0
    print(f"\nReplayed from {start}: the batch fails there too, first in {first['tensor']} on rank {first['rank']}.")
    return 1


def replay(run_dir: Path, point: frozen.Frozen) -> dict | str:
    """Start the ranks of the run's layout on the saved batch; what they found, or why that was not possible."""
    folder = run_dir / DOCTOR / REPLAY
    newest = checkpoint_files.latest(run_dir / checkpoint_files.FOLDER)
    cfg = point.cfg
    cfg.tracking = replace(cfg.tracking, mode=TrackingMode.disabled)
    cfg.checkpoint = replace(cfg.checkpoint, every=None, resume=str(newest.absolute()) if newest else None)
    again = frozen.freeze(cfg, folder, point.choices, point.overrides)
    entry = [sys.executable, "-u", "-m", "precision.doctor", "--rank", str(folder.absolute())]
    try:
        launch.run(folder, again, entry)
        return result.load(folder, "replay.json")
    except launch.JobFailed as failure:
        return f"the replay failed: {failure}"


def rank(folder: Path) -> None:
    """One rank of the replay."""
    from parallel import quiet

    quiet.libraries()
    import numpy as np

    from models import attention
    from optim import build, clip
    from parallel import facts, groups, wrap
    from parallel.checkpoint import Checkpoints
    from precision import first_bad, setup

    cfg = frozen.load(folder).cfg
    device = groups.start(cfg)
    setup.apply(cfg)
    attention.install(cfg.model.attention, cfg.precision.compute)
    chunks = wrap.model_chunks(cfg, device)
    optimizer = build.optimizer(cfg, chunks)
    wrap.connect(chunks, optimizer, cfg)
    schedule, clipper = build.schedule(cfg, optimizer), clip.Clipper(cfg, chunks, optimizer)
    done = Checkpoints(cfg, folder, chunks, optimizer, schedule, clipper).resume()
    batch = np.load(folder.parent / BATCH)
    dp_rank, dp_size = facts.data_rank()
    share = len(batch) // dp_size
    mine = batch[dp_rank * share : (dp_rank + 1) * share]
    micro_batches = [mine[at : at + cfg.train.micro_batch] for at in range(0, share, cfg.train.micro_batch)]

    def clear():
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()

    first = first_bad.find(chunks, micro_batches, cfg.train, clear)
    if os.environ["RANK"] == "0":
        start = f"the checkpoint after step {done}" if done else "the initial weights"
        result.write(folder, "replay.json", start=start, first=first)
    groups.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_process.run(rank, Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
