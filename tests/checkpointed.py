"""Runs with checkpoints, for the tests: short ones of a tiny model, started as a user would."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from parallel import checkpoint_files

REPO = Path(__file__).resolve().parent.parent
SMALL = (
    "train.global_batch=8 train.micro_batch=2 train.seq_len=64 train.sample_length=0 train.eval_every=1000 "
    "train.eval_sequences=8 model.layers=4 model.hidden=64 model.ffn_hidden=176 model.heads=4 model.kv_heads=4 "
    "tracking.mode=disabled launch.device=cpu"
).split()
# Everything that a checkpoint holds: a loss scale, generators that dropout draws from, moments, two ranks.
TRAINED = (
    "parallel=dp2 precision=fp16 model.dropout=0.1 train.steps=6 checkpoint.every=3 schedule.warmup_steps=2"
).split()
# Learning rates that do not depend on how long the run is, so that runs of different lengths can be compared.
ENDLESS = ["schedule=inverse_sqrt", "schedule.warmup_steps=2"]


def wait(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Return as soon as the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def newest(run: Path) -> int:
    """The step of a run's newest checkpoint, 0 when there is none."""
    found = checkpoint_files.latest(run / "checkpoints")
    return int(found.name[5:]) if found else 0


def whole(run: Path) -> int:
    """The step of a run's newest checkpoint, which must be undamaged; 0 when there is none."""
    found = checkpoint_files.latest(run / "checkpoints")
    if found is None:
        return 0
    about = checkpoint_files.read_about(found)
    assert checkpoint_files.damage(found, about) is None
    return about["step"]


def environment() -> dict[str, str]:
    """This process's, without W&B's account, GPUs and launchers' variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "RANK", "WORLD", "SLURM"))}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def command(folder: Path, *words: str) -> list[str]:
    """The command line that trains in `folder`."""
    return [sys.executable, str(REPO / "train.py"), *SMALL, *words, f"hydra.run.dir={folder}"]


def runner(root: Path) -> Callable[..., Path]:
    """`run("name", ...)` trains in the folder `root/name`, once, and returns it, or expects `refused` on stderr.

    What it says is left in `said.txt`.
    """

    def run(name: str, *words: str, refused: str | None = None) -> Path:
        if (root / name / "said.txt").exists():
            return root / name
        done = subprocess.run(
            command(root / name, *words), cwd=root, env=environment(), capture_output=True, text=True, timeout=300
        )
        if (root / name).exists():
            (root / name / "said.txt").write_text(done.stdout + done.stderr)
        if refused is None:
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        else:
            assert done.returncode != 0 and refused in done.stderr, done.stderr[-3000:]
            assert "Traceback" not in done.stderr
        return root / name

    return run


def at(run: Path, step: int) -> Path:
    """A run's checkpoint after `step` steps."""
    return run / "checkpoints" / checkpoint_files.name_of(step)


def steps(run: Path, name: str = "train/loss") -> dict[int, float]:
    """A metric of a run, by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}
