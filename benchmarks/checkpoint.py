"""How fast a checkpoint is written against `dd` on the same disk, and how long training stops for it.

    python -m benchmarks.checkpoint [rounds=7] [folder=runs] [override ...]

One process trains a model of 100 million parameters (1.2 GB of FP32 master weights and moments). In each round a
checkpoint is written while nothing else happens, then `dd` writes the same bytes beside it (bs=4M conv=fsync), then a
second checkpoint is written beside training steps, and as many steps follow without one. Disks vary from second to
second: the ratio is taken within each round, and its median, with the spread between the quartiles, is printed and
written to benchmarks/results/checkpoint.json. The first round, in which the host memory of the copy is new, is told
apart from the others.

Whoever writes just after something was removed finds warm memory and blocks, and can be three times as fast. So both
start some seconds after the last removal, and dd's file, like a checkpoint, is removed when the next one is complete.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.overhead import Bare
from benchmarks.setting import ROOT, keep, only_rank

SETTLE_S = 4  # before each of the two
MODEL = (
    "model.layers=12 model.hidden=768 model.ffn_hidden=2048 model.heads=12 model.kv_heads=12 model.vocab=10240 "
    "train.global_batch=1 train.micro_batch=1 train.seq_len=64 data=mock parallel=single launch.device=cpu "
    "checkpoint.every=1 checkpoint.keep=1 checkpoint.asynchronous=true tracking.mode=disabled"
).split()


def main(words: list[str]) -> None:
    """Run, print, write."""
    own = dict(word.split("=") for word in words if word.startswith(("rounds=", "folder=")))
    words = [word for word in words if not word.startswith(("rounds=", "folder="))]
    from parallel import compose
    from parallel.frozen import load

    home = Path(own.get("folder", ROOT / "runs"))
    home.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="benchmark_", dir=home))
    try:
        cfg, choices, task, _ = compose.compose([*MODEL, *words])
        compose.freeze(compose.check(cfg), folder, choices, task)
        rounds = measure(folder, load(folder).cfg, int(own.get("rounds", 7)))
        report(load(folder), rounds, sum(path.stat().st_size for path in tensor_files(folder)))
    finally:
        shutil.rmtree(folder)


def tensor_files(folder: Path) -> list[Path]:
    """The files of tensors of the newest checkpoint."""
    from parallel import checkpoint_files as files

    return list(files.latest(folder / files.FOLDER).glob("*.distcp"))


def measure(folder: Path, cfg, rounds: int) -> list[dict[str, float]]:
    """Seconds of everything, by round."""
    only_rank()
    from parallel import quiet

    quiet.libraries()
    from optim import build, clip
    from parallel import groups
    from parallel.checkpoint import Checkpoints

    groups.start(cfg)
    bare = Bare(cfg)
    bare.build()
    chunks, optimizer = [bare.chunk], bare.optimizer
    schedule, clipper = build.schedule(cfg, optimizer), clip.Clipper(cfg, chunks, optimizer)
    checkpoints = Checkpoints(cfg, folder, chunks, optimizer, schedule, clipper)
    for _ in range(3):
        bare.step()
    found, step = [], 0
    for number in range(rounds + 1):
        print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
        step += 1
        time.sleep(SETTLE_S)
        began = time.perf_counter()
        checkpoints.save(step)
        stopped = time.perf_counter() - began
        checkpoints.writer.finish()
        seconds = {"stopped": stopped, "written": time.perf_counter() - began}
        time.sleep(SETTLE_S)
        seconds["dd"] = dd(folder)
        step += 1
        began = time.perf_counter()
        checkpoints.save(step)
        seconds["stopped_in_training"] = time.perf_counter() - began
        beside = [timed(bare.step)]
        while checkpoints.writer.busy():
            beside.append(timed(bare.step))
        checkpoints.writer.finish()
        seconds["written_in_training"] = time.perf_counter() - began
        seconds["step_beside"] = statistics.mean(beside)
        seconds["step_alone"] = statistics.mean(timed(bare.step) for _ in beside)
        found.append(seconds)
    print(file=sys.stderr)
    groups.stop()
    return found


def timed(call) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def dd(folder: Path) -> float:
    """Seconds in which dd writes and syncs the bytes of the newest checkpoint, which lie in the page cache.

    The file of the time before makes way for it afterwards.
    """
    old, new = folder / "dd", folder / "dd_new"
    words = [["dd", f"if={path}", f"of={new}", "bs=4M", "conv=fsync"] for path in tensor_files(folder)]
    seconds = timed(lambda: [subprocess.run(command, check=True, capture_output=True) for command in words])
    os.replace(new, old)
    return seconds


def report(frozen, rounds: list[dict[str, float]], size: int) -> None:
    """Print the table and write it with configuration and versions."""

    first, *rest = rounds
    middle = {name: statistics.median(one[name] for one in rest) for name in first}
    ratios = statistics.quantiles([one["dd"] / one["written"] for one in rest], n=4)
    stops = statistics.median(one["stopped_in_training"] / one["written"] for one in rest)
    slower = statistics.median(one["step_beside"] / one["step_alone"] for one in rest)
    found = {
        "bytes": size,
        "speed_of_dd": ratios[1],
        "speed_of_dd_quartiles": [ratios[0], ratios[2]],
        "training_stops_for": stops,
        "training_stops_for_in_first": first["stopped"] / middle["written"],
        "step_beside_to_alone": slower,
        "seconds": middle,
        "rounds": rounds,
        "overrides": frozen.overrides,
        "config_hash": frozen.config_hash,
    }
    rate = {name: size / middle[name] / 1e6 for name in ("written", "dd")}
    print(f"{size / 1e9:.2f} GB, medians of {len(rest)} rounds")
    print(f"dd          {middle['dd']:6.2f} s  {rate['dd']:6.0f} MB/s")
    print(f"checkpoint  {middle['written']:6.2f} s  {rate['written']:6.0f} MB/s: {ratios[1]:.0%} of dd's speed")
    print(f"            (quartiles of the rounds {ratios[0]:.0%} to {ratios[2]:.0%})")
    print(f"training    stops for {middle['stopped_in_training']:.3f} s, {stops:.1%} of the time of writing")
    print(f"            ({first['stopped']:.2f} s for the first, when the memory of the copy is new)")
    print(f"            a step takes {slower:.2f} times as long while one is written")
    keep("checkpoint", **found)


if __name__ == "__main__":
    main(sys.argv[1:])
