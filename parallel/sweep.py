"""The points of a sweep: what sweep.json says of them, what is done already, what is left, how they ended.

    SWEEP_DIR/sweep.json         id, started, command, points (number, folder, overrides, config_hash, choices, differs,
                                 skipped); written before the first point starts
    SWEEP_DIR/<number>_.../      the run folder of a point

A point is known by the hash of its resolved configuration: a sweep that is continued runs what has no `ok` under that
hash, and a point whose configuration was edited is a new one. Nothing here imports torch.
"""

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from parallel import resume
from parallel.frozen import FILE as FROZEN_FILE
from parallel.frozen import Frozen, freeze
from parallel.refused import Refused
from tracking import result, runs
from tracking.runs import SWEEP_FILE

LOCK_FILE = ".lock"

# The sweep that this process runs; there is one at most.
current: "Sweep | None" = None


class PointFailed(Exception):
    """A point that has no outcome for a sweeper that searches."""


@dataclass
class Point:
    """One point, composed and checked. `cfg` is resolved, or None where `problems` say why it cannot run."""

    # What Hydra composes it from.
    words: list[str]
    # Those that repeat the point on its own.
    overrides: list[str]
    choices: dict[str, str]
    cfg: DictConfig | None
    config_hash: str | None
    problems: list[str] = field(default_factory=list)
    number: int = 0
    # Its run folder's name inside the sweep's folder.
    folder: str = ""
    differs: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.differs.items()]
        return f"#{self.number} {' '.join(words or self.overrides)}".rstrip()

    def entry(self) -> dict:
        """Its lines of sweep.json."""
        names = ("number", "folder", "overrides", "config_hash", "choices", "differs")
        return {name: getattr(self, name) for name in names} | {"skipped": "; ".join(self.problems) or None}


class Sweep:
    """A sweep's folder while this process works on it; no other process can meanwhile."""

    def __init__(self, folder: Path, command: list[str], options: DictConfig):
        """Opens a new sweep, or with `options.resume` the one in the folder.

        `options` has the keys of conf.schema.CommandLine. Raises Refused when the folder is in use.
        """
        self.folder, self.points = folder, []
        self._metric = options.optimized_metric
        self._retry = resume.statuses(options.retry)
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # The system gives it back however this process ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Refused([f"{folder} is a sweep that is still running."]) from None
        self._about = resume.about(folder)
        if self._about and not options.resume:
            raise Refused([f"{folder} holds a sweep already: continue it with resume={folder}."])
        began = {"id": folder.resolve().name, "started": result.now()}
        self._about = began | self._about | {"command": resume.without_own(command)}
        self._earlier: list[dict] = self._about.pop("points", [])

    def take(self, points: list[Point], folder_of) -> list[Point]:
        """Adds points, gives each its number and folder, writes sweep.json, and returns the points to run.

        `folder_of(point)` names the folder of a point that has its number.
        """
        taken = {entry["number"] for entry in self._earlier} | {point.number for point in self.points}
        number = max(taken, default=-1) + 1
        for point in points:
            known = next((entry for entry in self._earlier if _same(entry, point)), None)
            if known:
                self._earlier.remove(known)
                point.number, point.folder = known["number"], known["folder"]
            else:
                point.number, number = number, number + 1
                point.folder = folder_of(point)
                if (self.run_dir(point) / FROZEN_FILE).exists():
                    raise Refused([f"{self.run_dir(point)} holds a run already: name another hydra.sweep.dir."])
        self.points += points
        _name_differences(self.points)
        # Of an earlier command, and started: shown with the others, but no longer part of the sweep.
        left = [entry for entry in self._earlier if (self.folder / entry["folder"]).exists()]
        entries = sorted([point.entry() for point in self.points] + left, key=lambda entry: entry["number"])
        result.write(self.folder, SWEEP_FILE, **self._about, points=entries)
        return [point for point in points if not point.problems and self._is_due(point)]

    def run_dir(self, point: Point) -> Path:
        """The run folder of a point."""
        return self.folder / point.folder

    def status(self, point: Point) -> str:
        """How a point ended: a status of result.json, skipped, missing, or interrupted where it left no result."""
        if point.problems:
            return "skipped"
        return runs.load(self.run_dir(point)).status if self.run_dir(point).exists() else "missing"

    def freeze(self, point: Point) -> Frozen:
        """Make the run folder of a point ready: what an earlier try left goes, unless this one goes on from it."""
        run_dir = self.run_dir(point)
        run_dir.mkdir(parents=True, exist_ok=True)
        result.clear(run_dir, history=point.cfg.checkpoint.resume != "auto")
        return freeze(point.cfg, run_dir, point.choices, point.overrides)

    def outcome(self, point: Point) -> float | None:
        """The value of `optimized_metric` that a point reached, None without a metric or when it did not end well.

        Raises PointFailed when it ended well and has no such metric.
        """
        if not self._metric or self.status(point) != "ok":
            return None
        from tracking.table import measure

        run = runs.load(self.run_dir(point))
        try:
            return measure([run], self._metric)[id(run)]
        except ValueError as error:
            raise PointFailed(f"optimized_metric={self._metric}: {error}") from None

    def end(self) -> None:
        """Print the table of all points and write the page that compares them."""
        from tracking import compare
        from tracking.table import table

        print("\n" + table(runs.find([self.folder])))
        try:
            print(f"\nComparison, to open in a browser:\n{compare.write(self.folder)}")
        except (OSError, ValueError) as error:
            print(f"\nThe comparison could not be written: {error}")
        if self.exit_code():
            print(f"\nTo run what is not ok:\npython train.py resume={self.folder}", flush=True)

    def exit_code(self) -> int:
        """1 when a point that could run is not ok."""
        return int(any(self.status(point) not in ("ok", "skipped") for point in self.points))

    def _is_due(self, point: Point) -> bool:
        if not self.run_dir(point).exists():
            status = "missing"
        else:
            run = runs.load(self.run_dir(point))
            status = run.status if run.config_hash == point.config_hash else "damaged"
        return status in self._retry if self._retry else status != "ok"


def _same(entry: dict, point: Point) -> bool:
    """Whether an entry of sweep.json is this point; of a point that cannot run, its words tell."""
    if point.config_hash is None or entry["config_hash"] is None:
        return point.config_hash == entry["config_hash"] and point.overrides == entry["overrides"]
    return point.config_hash == entry["config_hash"]


def _name_differences(points: list[Point]) -> None:
    """Give each point the choices and words that not all points share."""
    said = [dict(word.lstrip("+~").partition("=")[::2] for word in point.overrides) | point.choices for point in points]
    names = {name for own in said for name in own}
    shared = {name for name in names if len({own.get(name) for own in said}) == 1}
    for point, own in zip(points, said, strict=True):
        point.differs = {name: value for name, value in own.items() if name not in shared}
