"""Starts tracked_run.py in a run folder that holds a frozen configuration, and reads what it leaves."""

import json
import subprocess
import sys
import time
from pathlib import Path

from parallel.compose import check, compose
from parallel.frozen import Frozen, freeze

PROGRAM = Path(__file__).with_name("tracked_run.py")
WANDB = str(Path(sys.executable).with_name("wandb"))


def point(run_dir: Path, *overrides: str) -> Frozen:
    """Freezes a point into `run_dir`, the way train.py does."""
    cfg, choices, given, _ = compose(["parallel=single", "train.steps=300", "train.log_every=5", *overrides])
    return freeze(check(cfg), run_dir, choices, given)


def sweep(folder: Path, *points: str) -> list[Frozen]:
    """Freezes the points of a sweep, each given by its overrides, into `folder`/0, 1, ... with their sweep.json."""
    frozen = [point(folder / f"{number}_point", *words.split()) for number, words in enumerate(points)]
    rows = [
        {"number": number, "folder": f"{number}_point", "differs": dict(word.split("=") for word in words.split())}
        for number, words in enumerate(points)
    ]
    about = {"id": folder.name, "started": "2026-01-02T10:00:00+00:00", "points": rows}
    (folder / "sweep.json").write_text(json.dumps(about))
    return frozen


def command(run_dir: Path, steps: int, step_s: float = 0.0, end: str = "", *goes_on) -> list[str]:
    """The command of a tracked run; see tracked_run.py."""
    return [sys.executable, str(PROGRAM), str(run_dir), str(steps), str(step_s), end, *map(str, goes_on)]


def run(run_dir: Path, env: dict, steps: int = 10, end: str = "", step_s: float = 0.0, timeout: float = 60, goes_on=()):
    """Runs to the end; stdout and stderr as text."""
    words = command(run_dir, steps, step_s, end, *goes_on)
    return subprocess.run(words, cwd=run_dir.parent, env=env, capture_output=True, text=True, timeout=timeout)


def lines(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl, each of which must be JSON as the standard has it: without NaN."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def result(run_dir: Path) -> dict:
    """result.json."""
    return json.loads((run_dir / "result.json").read_text())


def wait_for_step(run_dir: Path, step: int, timeout: float = 30) -> None:
    """Returns as soon as metrics.jsonl has a step."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        file = run_dir / "metrics.jsonl"
        if file.exists() and f'"step": {step},' in file.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come within {timeout} s")


def leet(run_dir: Path, env: dict, kind: str = "history") -> tuple[dict, list[dict]]:
    """What W&B's own reader finds in the file of a run: its overview and its records of a kind."""
    (folder,) = (run_dir / "wandb").glob("*run-*_*")

    def inspect(*words: str) -> str:
        done = subprocess.run(
            [WANDB, "leet", "inspect", *words, "--json", str(folder)],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    records = [json.loads(line) for line in inspect().splitlines()]
    found = [record[kind] for record in records if record["type"] == kind]
    return json.loads(inspect("--summary")), [row["item"] for row in found] if kind == "history" else found
