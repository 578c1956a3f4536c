"""The run folders below any folder, finished or not, read without trusting them; nothing here imports torch.

status     what result.json says (tracking.result), or where that is not possible
           interrupted   the run began and left no result.json: its program was killed, or is still running
           missing       a point that sweep.json names and that never got a run folder
           skipped       a point that the sweep left out as illegal
           damaged       result.json cannot be read
cause      why the run is not ok, one line
problem    what is wrong with the folder's files, one sentence; the rest of the folder is used all the same
"""

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import yaml

from tracking import history, result

CONFIG_FILE = "resolved.yaml"
SWEEP_FILE = "sweep.json"
RUN_FILES = {CONFIG_FILE, result.FILE, result.FACTS_FILE, history.FILE}
# Ten times as fast as the loader in Python, which is enough of the time for 60 runs to be worth it.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# What resolved.yaml holds besides the configuration.
ABOUT = ("choices", "overrides", "world_size", "config_hash")


@dataclass
class Run:
    """One run folder. `result` has the fields of result.json, from the metrics when the file is not there."""

    folder: Path
    number: int = 0
    status: str = "missing"
    cause: str | None = None
    problem: str | None = None
    result: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    cfg: dict | None = None
    choices: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    config_hash: str | None = None
    # The sweep's own words for what sets this point apart; empty outside a sweep.
    differs: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl, those before the damage when it is damaged; `problem` says so then."""
        lines = []
        try:
            for line in history.read(self.folder):
                lines.append(line)
        except (OSError, ValueError) as error:
            self.report(f"{_said(error).removeprefix(f'{self.folder}{os.sep}')}; what comes before is shown")
        return lines

    @cached_property
    def keys(self) -> dict[str, object]:
        """The configuration by dotted key."""
        return flat(self.cfg or {})

    def value(self, name: str) -> float | None:
        """A number of result.json, NaN and infinity included; None where there is none."""
        return number(self.result.get(name))

    def report(self, problem: str) -> None:
        """Adds to what is wrong with the folder."""
        if problem not in (self.problem or ""):
            self.problem = f"{self.problem}; {problem}" if self.problem else problem


def find(paths: list[str | Path]) -> list[Run]:
    """All runs in the folders and below them, in order of their numbers; points of a sweep without a folder, too.

    Runs get new numbers, from 0, where those of several sweeps would clash. Raises FileNotFoundError for a path that
    does not exist, and never because of what a file holds.
    """
    runs: list[Run] = []
    seen: set[str] = set()
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is no folder")
        runs += _below(path, seen)
    numbers = [run.number for run in runs]
    if len(set(numbers)) < len(numbers):
        for position, run in enumerate(runs):
            run.number = position
    return runs


def load(folder: str | Path) -> Run:
    """One run folder, whatever state it is in."""
    folder = Path(folder)
    first, _, rest = folder.name.partition("_")
    run = Run(folder, number=int(first) if first.isdecimal() and rest else 0)
    frozen = _mapping(run, CONFIG_FILE)
    if frozen is not None:
        run.cfg = {name: value for name, value in frozen.items() if name not in ABOUT}
    run.facts = _mapping(run, result.FACTS_FILE) or {}
    outcome = _mapping(run, result.FILE)
    for known in (run.facts, outcome or {}, frozen or {}):
        run.choices = _texts(known.get("choices")) or run.choices
        run.overrides = _words(known.get("overrides")) or run.overrides
        run.config_hash = known.get("config_hash") or run.config_hash
    if outcome:
        run.result = run.facts | outcome
        run.status, run.cause = str(outcome.get("status")), outcome.get("cause") and str(outcome["cause"])
        if run.status not in result.STATUSES:
            run.status = "damaged"
            run.report(f"{result.FILE} has no known status")
        if frozen and outcome.get("config_hash") not in (None, run.config_hash):
            run.report(f"{result.FILE} is that of another configuration than {CONFIG_FILE}")
        return run
    summary = result.Summary()
    for line in run.metrics():
        summary.add(int(line.pop("step")), line)
    run.result = run.facts | summary.fields()
    if (folder / result.FILE).exists():
        run.status, run.cause = "damaged", f"{result.FILE} cannot be read"
    else:
        run.status = "interrupted"
        run.cause = f"left no {result.FILE}: killed, or still running; came to step {run.result['steps']}"
    return run


def number(value: object) -> float | None:
    """A number as JSON files of a run hold it, where NaN and infinity are strings; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def finite(value: object) -> bool:
    """Whether this is a number, and neither NaN nor infinite."""
    known = number(value)
    return known is not None and math.isfinite(known)


def flat(values: dict, prefix: str = "") -> dict[str, object]:
    """A nested dictionary with the keys that an override would have."""
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def labels(runs: list[Run]) -> list[str]:
    """The names that tell these runs apart: groups and keys with more than one value, the most telling first.

    A key counts when somebody set it, or when the names before it do not explain its values: an lr that comes with the
    optimizer, or a number of steps that follows from the tokens, needs no column.
    """
    groups = {group: None for run in runs for group in run.choices if group != "tracking"}
    first = [group for group in sorted(groups, key=_order) if _several(runs, group)]
    # Where metrics go besides the console changes nothing in what is compared.
    keys = {key: None for run in runs for key in run.keys if not key.startswith("tracking.")}
    given = {word.lstrip("+~").partition("=")[0] for run in runs for word in run.overrides}
    first += [key for key in keys if key in given and _several(runs, key)]
    known = [run for run in runs if run.cfg is not None]
    for key in keys:
        if key in first or not _several(known, key) or key.endswith(".name"):
            continue
        values: dict[tuple, object] = {}
        if any(values.setdefault(_labelled(run, first), value_of(run, key)) != value_of(run, key) for run in known):
            first.append(key)
    return first


def value_of(run: Run, label: str) -> str:
    """What a run has for a group or a key; empty where that is not known."""
    if label in run.choices:
        return run.choices[label]
    if label in run.keys:
        return text(run.keys[label])
    return run.differs.get(label, "")


def text(value: object) -> str:
    """A value as one would write it in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _below(path: Path, seen: set[str]) -> Iterator[Run]:
    """The runs of a folder: itself, those a sweep.json names, and those in the folders below, each folder once."""
    # Links are followed, which people use to collect runs, and may lead in a circle.
    if (place := os.path.realpath(path)) in seen:
        return
    seen.add(place)
    try:
        entries = {entry.name: entry.is_dir() for entry in os.scandir(path)}
    except OSError:
        return
    if RUN_FILES & entries.keys():
        yield load(path)
        return
    points, named = _points(path) if SWEEP_FILE in entries else ({}, None)
    folders = [name for name, is_folder in entries.items() if is_folder and not name.startswith(".")]
    for name in sorted(folders | points.keys(), key=_natural):
        point = points.get(name)
        inside = list(_below(path / name, seen)) if name in folders else []
        if point is None:
            yield from inside
            continue
        run = inside[0] if inside else Run(path / name, cause="not started")
        run.number = point["number"] if isinstance(point.get("number"), int) else run.number
        run.choices = run.choices or _texts(point.get("choices"))
        run.overrides = run.overrides or _words(point.get("overrides"))
        run.differs = _texts(point.get("differs"))
        run.config_hash = run.config_hash or point.get("config_hash")
        if point.get("skipped") and not inside:
            run.status, run.cause = "skipped", str(point["skipped"])
        yield run
    if named:
        yield Run(path, number=-1, status="damaged", problem=named)


def _points(sweep: Path) -> tuple[dict[str, dict], str | None]:
    """The points of sweep.json by folder; and what is wrong with the file."""
    try:
        points = json.loads((sweep / SWEEP_FILE).read_bytes())["points"]
        return {Path(str(point["folder"])).name: point for point in points}, None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, f"{sweep / SWEEP_FILE} is damaged: {_said(error)}; points without a folder are not known"


def _mapping(run: Run, name: str) -> dict | None:
    """A JSON or YAML file of a run folder, None when it is not there; damage is reported to the run."""
    try:
        content = (run.folder / name).read_bytes()
        found = yaml.load(content, LOADER) if name == CONFIG_FILE else json.loads(content)
        if isinstance(found, dict):
            return found
        run.report(f"{name} is damaged: it holds no mapping")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        run.report(f"{name} is damaged: {_said(error)}")
    return None


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines[:2]) or type(error).__name__


def _texts(found: object) -> dict[str, str]:
    return {str(name): text(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _words(found: object) -> list[str]:
    return [str(word) for word in found] if isinstance(found, list) else []


def _natural(name: str) -> list:
    """A key for sorting in which 10 comes after 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _order(group: str) -> int:
    return result.NAMED.index(group) if group in result.NAMED else len(result.NAMED)


def _several(runs: list[Run], label: str) -> bool:
    return len({value_of(run, label) for run in runs} - {""}) > 1


def _labelled(run: Run, names: list[str]) -> tuple:
    return tuple(value_of(run, name) for name in names)
