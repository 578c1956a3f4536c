"""The points of a sweep, or any runs, as a table for a terminal: what they are, how they ended, what they reached."""

import shutil
import statistics
import sys
from collections import Counter
from dataclasses import dataclass

from tracking.runs import Run, finite, labels, number, value_of

# Where result.json keeps the metrics of tracking.metrics; every other metric is taken from the last step that has it.
FIELDS = {
    "train/loss": "loss_final",
    "val/loss": "val_loss_final",
    "perf/tokens_per_s": "tokens_per_s",
    "perf/step_s": "step_s",
    "perf/mfu": "mfu",
    "mem/peak_gib": "peak_gib",
    "grad/clip_fraction": "clip_fraction",
    "amp/skipped_steps": "skipped_steps",
}
MORE_IS_BETTER = ("tokens_per_s", "mfu", "tflops")
CAUSE_WIDTH = 24


@dataclass(frozen=True)
class Column:
    """A measured column: its title, its field of result.json and how it is written."""

    title: str
    field: str
    form: str

    def text(self, run: Run) -> str:
        """The value as it is shown; a dash where there is none."""
        value = run.value(self.field)
        return "–" if value is None else format(value, self.form)


COLUMNS = (
    Column("val loss", "val_loss_final", ".4f"),
    Column("best val", "val_loss_best", ".4f"),
    Column("train loss", "loss_final", ".4f"),
    Column("best train", "loss_best", ".4f"),
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("MFU", "mfu", ".1%"),
    Column("peak GiB", "peak_gib", ".2f"),
    Column("clipped", "clip_fraction", ".0%"),
    Column("skipped", "skipped_steps", ".0f"),
)


def table(runs: list[Run], by: str | None = None, metric: str | None = None) -> str:
    """The table as text, one line a run, then how many ended how.

    `by` (a group or a key, such as "precision" or "optimizer.lr") groups the lines, `metric` (of tracking.metrics or a
    field of result.json) puts the best first; both together add what each group reached. Raises ValueError for a `by`
    or a `metric` that no run has.
    """
    if not runs:
        return "No runs."
    values = measure(runs, metric) if metric else None
    ordered = arrange(runs, by, metric, values)
    names = labels(runs)
    if by and by not in names:
        names.insert(0, by)
    # Without a value in any line a column says nothing.
    columns = [column for column in COLUMNS if any(run.value(column.field) is not None for run in runs)]
    head = ["#", *(short_name(name, names) for name in names), "status", *(column.title for column in columns)]
    lines = [
        [str(run.number), *(value_of(run, name) or "–" for name in names), run.status, *(c.text(run) for c in columns)]
        for run in ordered
    ]
    left = set(range(1, len(names) + 2))
    if metric and metric not in FIELDS and metric not in {column.field for column in columns}:
        head.append(metric)
        for run, line in zip(ordered, lines, strict=True):
            line.append("–" if values[id(run)] is None else f"{values[id(run)]:.5g}")
    text = _aligned([head, *lines], left)
    causes = [why(run) for run in ordered]
    if any(causes):
        text[0] += "  cause"
        room = _room(max(map(len, text)))
        text[1:] = [line + "  " + _cut(cause, room) for line, cause in zip(text[1:], causes, strict=True)]
    text = [line.rstrip() for line in text]
    if len({run.folder.parent for run in runs}) > 1:
        text += ["", *(f"#{run.number}  {run.folder}" for run in ordered)]
    counts = Counter(run.status for run in runs)
    text += ["", f"{len(runs)} points: " + ", ".join(f"{count} {status}" for status, count in counts.most_common())]
    if by and metric:
        text += ["", f"{metric} by {by}, of the points that ended ok", *_summary(ordered, by, metric, values)]
    return "\n".join(text)


def measure(runs: list[Run], metric: str) -> dict[int, float | None]:
    """A metric of each run, by id(run). Raises ValueError with the names there are when no run has it."""
    field = FIELDS.get(metric, metric)
    found = {id(run): run.value(field) for run in runs}
    if all(value is None for value in found.values()):
        known: set[str] = set()
        for run in runs:
            last: dict[str, float] = {}
            for line in run.metrics():
                last |= line
            known |= last.keys()
            # As everywhere, an average without the first step says more than the last step alone.
            found[id(run)] = number(last.get(f"{metric}_avg", last.get(metric)))
        if metric not in known and metric not in FIELDS:
            names = sorted((known | FIELDS.keys()) - {"step"})
            raise ValueError(f"no run has the metric {metric}; there are: {', '.join(names)}")
    return found


def more_is_better(metric: str) -> bool:
    """Whether a larger value of a metric is the better one."""
    return any(word in metric for word in MORE_IS_BETTER)


def arrange(runs: list[Run], by: str | None, metric: str | None, values: dict | None) -> list[Run]:
    """The runs in the order of a group's or key's values, then the best first, those that did not end ok last."""
    if by and not any(value_of(run, by) for run in runs):
        known = sorted({name for run in runs for name in (*run.choices, *run.keys)})
        raise ValueError(f"no run has {by}; there are: {', '.join(known)}")
    sign = -1 if metric and more_is_better(metric) else 1

    def place(run: Run) -> tuple:
        group = by_value(value_of(run, by)) if by else ()
        if not metric:
            return group, run.number
        value = values[id(run)]
        return group, run.status != "ok", not finite(value), sign * value if finite(value) else 0.0, run.number

    return sorted(runs, key=place)


def why(run: Run) -> str:
    """Cause, what is wrong with the folder, and what to try, in one line."""
    advice = run.result.get("advice")
    return "; ".join(part for part in (run.cause, run.problem, advice and f"try {advice}") if part)


def by_value(text: str) -> tuple:
    """A key for sorting values: numbers by size, before words."""
    value = number(text)
    return (1, 0.0, text) if value is None else (0, value, "")


def short_name(name: str, names: list[str]) -> str:
    """A key by its last part where that is clear: lr for optimizer.lr."""
    last = name.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in names) == 1 else name


def _summary(runs: list[Run], by: str, metric: str, values: dict) -> list[str]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(value_of(run, by) or "–", []).append(run)
    lines = [[by, "points", "ok", "best", "median", "worst", "best point"]]
    for name, members in groups.items():
        good = [run for run in members if run.status == "ok" and finite(values[id(run)])]
        line = [name, str(len(members)), str(len(good))]
        if good:
            reached = [values[id(run)] for run in good]
            line += [_plain(reached[0]), _plain(statistics.median(reached)), _plain(reached[-1]), f"#{good[0].number}"]
        lines.append(line + ["–"] * (7 - len(line)))
    return _aligned(lines, {0})


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _aligned(lines: list[list[str]], left: set[int]) -> list[str]:
    """Lines of cells in columns; those in `left` start at the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def _room(used: int) -> int | None:
    """Columns left for the causes on a terminal; None where nothing needs to be cut."""
    if not sys.stdout.isatty():
        return None
    return max(CAUSE_WIDTH, shutil.get_terminal_size().columns - used - 2)


def _cut(text: str, room: int | None) -> str:
    return text if room is None or len(text) <= room else text[: room - 1] + "…"
