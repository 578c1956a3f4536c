"""The page on which runs are compared: curves overlaid, bars, what differs, and what became of every point."""

import os
from html import escape
from pathlib import Path

from tracking import curves, outcomes, page
from tracking.console import short
from tracking.differences import common, differences
from tracking.runs import Run, finite, labels, value_of
from tracking.table import COLUMNS, Column, by_value, short_name, why

SCRIPTS = ("outcomes.js", "compare.js")
STYLES = ("page.css", "compare.css")
BARS = ("tokens_per_s", "mfu", "peak_gib", "clip_fraction")
# Of more points nobody tells the colours apart; then a choice gives a curve its colour.
MOST_COLOURED_APART = 8


def html(title: str, runs: list[Run], place: Path, by: str | None = None) -> str:
    """The page, to be kept in the folder `place`. `by` is the group or key that gives the curves their colour first."""
    names = labels(runs)
    if by and by not in names:
        names.insert(0, by)
    # Reading the curves finds damage, which the rest of the page tells.
    drawn = [curves.of_run(run, len(runs)) for run in runs]
    data = {
        "labels": _labels(runs, names),
        # Without such a label the page takes the first there is.
        "colour": by or ("point" if len(runs) <= MOST_COLOURED_APART or not names else names[0]),
        "runs": [
            {"n": run.number, "name": name_of(run, names), "values": _of_labels(run, names), "curves": found}
            for run, found in zip(runs, drawn, strict=True)
        ],
        "charts": [
            {"key": key, "title": name} for key, (name, *_) in curves.CURVES.items() if any(key in one for one in drawn)
        ],
        "outcomes": outcomes.charts(runs, names),
    }
    body = "".join(
        (
            _head(title, runs, names, place),
            _charts(data["charts"]),
            _outcomes(data["outcomes"]),
            _points(runs, names, place),
            _not_ok(runs, names),
            _differences(runs),
        )
    )
    return page.document(title, body, data, SCRIPTS, STYLES)


def name_of(run: Run, names: list[str]) -> str:
    """What a point is called by: tp2 · bf16 · clip 0.1 · lr 0.001; its folder when nothing sets it apart."""
    words = []
    for name in names:
        if value := value_of(run, name):
            plain_choice = name in run.choices and name != "clip"
            words.append(value if plain_choice else f"{short_name(name, names)} {value}")
    return " · ".join(words) or run.folder.name


def _labels(runs: list[Run], names: list[str]) -> list[dict]:
    """What curves can be coloured and filtered by: each label with its values, numbers by size."""
    found = [
        {"name": name, "values": sorted({value_of(run, name) for run in runs} - {""}, key=by_value)} for name in names
    ]
    if all(len(label["values"]) < len(runs) for label in found):
        found.insert(0, {"name": "point", "values": [f"#{run.number} {name_of(run, names)}" for run in runs]})
    return found


def _of_labels(run: Run, names: list[str]) -> dict[str, str]:
    return {"point": f"#{run.number} {name_of(run, names)}"} | {name: value_of(run, name) for name in names}


def _head(title: str, runs: list[Run], names: list[str], place: Path) -> str:
    good = [run for run in runs if run.status == "ok"]
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.status] = counts.get(run.status, 0) + 1
    others = ", ".join(f"{count} {status}" for status, count in counts.items() if status != "ok")
    items = [("Points", str(len(runs)), f"{len(good)} ok" + (f", {others}" if others else ""))]
    for label, field, best in (
        ("Lowest validation loss", "val_loss_final", min),
        ("Lowest training loss", "loss_final", min),
        ("Most tokens/s", "tokens_per_s", max),
        ("Least peak memory", "peak_gib", min),
    ):
        measured = [run for run in good if finite(run.value(field))]
        if measured and not (field == "loss_final" and len(items) > 1):
            run = best(measured, key=lambda run: run.value(field))
            column = next(column for column in COLUMNS if column.field == field)
            unit = " GiB" if field == "peak_gib" else ""
            items.append((label, column.text(run) + unit, f"#{run.number} {name_of(run, names)}"))
    started = [str(run.result["started"]) for run in runs if run.result.get("started")]
    since = f" · first point started {min(started)[:16].replace('T', ' ')} UTC" if started else ""
    return f'<h1>{escape(title)}</h1><p class="soft">{escape(short(place))}{escape(since)}</p>{page.figures(items)}'


def _charts(charts: list[dict]) -> str:
    """The controls and a place for each chart; compare.js fills both."""
    if not charts:
        return page.card("Curves", '<p class="soft">No point has come as far as its first step.</p>')
    cards = "".join(
        f'<div class="card" id="{chart["key"]}"><h2>{escape(chart["title"])}'
        '<label><input type="checkbox" class="log"> log scale</label></h2>'
        '<p class="readout soft"></p><div class="plot"></div></div>'
        for chart in charts
    )
    controls = (
        '<div class="card controls"><div id="filters"></div><p class="switches"><label>x-axis <select id="x">'
        '<option value="x">tokens</option><option value="t">training time</option></select></label>'
        '<label><input type="checkbox" id="smooth"> smoothed</label>'
        '<span class="soft">Drag across a chart to zoom, double-click to go back; ✕ marks a value that is not finite.'
        "</span></p></div>"
    )
    return f'<section>{controls}<div class="charts compared">{cards}</div></section>'


def _outcomes(charts: list[dict]) -> str:
    """A place for each chart of outcomes; outcomes.js fills them."""
    cards = "".join(
        f'<div class="card" id="{chart["key"]}"><h2>{escape(chart["title"])}</h2>'
        '<p class="readout soft"></p><div class="plot"></div></div>'
        for chart in charts
    )
    return f'<section><div class="charts compared outcomes">{cards}</div></section>' if charts else ""


def _points(runs: list[Run], names: list[str], place: Path) -> str:
    """The sortable table, with bars behind what is measured."""
    columns = [column for column in COLUMNS if any(run.value(column.field) is not None for run in runs)]
    most = {
        column.field: max((run.value(column.field) for run in runs if finite(run.value(column.field))), default=0.0)
        for column in columns
    }
    most |= {"clip_fraction": 1.0}
    heads = ["#", *(short_name(name, names) for name in names), "status", *(column.title for column in columns)]
    head = "".join(f'<th aria-sort="none"><button>{escape(one)}</button></th>' for one in heads)
    rows = []
    for position, run in enumerate(runs):
        cells = [f'<td data-v="{run.number}"><i class="dot"></i>{_link(run, place)}</td>']
        cells += [_cell(value_of(run, name) or "–") for name in names]
        cells.append(f'<td title="{escape(why(run))}"><span class="status {run.status}">{run.status}</span></td>')
        cells += [_measured(run, column, most[column.field]) for column in columns]
        rows.append(f'<tr data-run="{position}">{"".join(cells)}</tr>')
    content = (
        '<p class="soft">A click on a title sorts; a number opens the point’s own page.</p><div class="wide">'
        f'<table class="points"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
    return page.card("Points: outcome, throughput, memory, clipping", content)


def _link(run: Run, place: Path) -> str:
    report = run.folder / "report.html"
    if not report.exists():
        return str(run.number)
    return f'<a href="{escape(Path(os.path.relpath(report, place)).as_posix())}">{run.number}</a>'


def _cell(content: str) -> str:
    return f'<td data-v="{escape(content)}">{escape(content)}</td>'


def _measured(run: Run, column: Column, most: float) -> str:
    value = run.value(column.field)
    if not finite(value):
        return f'<td class="n">{escape(column.text(run))}</td>'
    bar = ""
    if column.field in BARS and most > 0:
        bar = f' bar" style="--w:{min(100.0, max(0.0, 100 * value / most)):.1f}%'
    return f'<td data-v="{value:.6g}" class="n{bar}">{escape(column.text(run))}</td>'


def _not_ok(runs: list[Run], names: list[str]) -> str:
    """Every point that is not ok, or whose folder is damaged, with the cause."""
    rows = "".join(
        f"<tr><td>{run.number}</td><td>{escape(name_of(run, names))}</td>"
        f'<td><span class="status {run.status}">{run.status}</span></td><td>{escape(why(run))}'
        f'<small class="soft">{escape(short(run.folder))}</small></td></tr>'
        for run in runs
        if run.status != "ok" or run.problem
    )
    head = "<tr><th>#</th><th>point</th><th>status</th><th>cause</th></tr>"
    return (
        page.card("Points that did not end well", f'<div class="wide"><table class="causes">{head}{rows}</table></div>')
        if rows
        else ""
    )


def _differences(runs: list[Run]) -> str:
    """What differs, who has which value, and what is the same."""
    rows = "".join(
        f"<tr><th>{escape(one.key)}</th><td>"
        + "".join(f'<span class="value"><code>{escape(value)}</code> {escape(who)}</span>' for value, who in one.values)
        + "</td></tr>"
        for one in differences(runs)
    )
    differing = f'<table class="differences">{rows}</table>' if rows else '<p class="soft">Nothing differs.</p>'
    same = page.table(common(runs))
    return page.card("Differences in configuration, machine and versions", differing) + page.folded(
        "The same in all points", f'<div class="groups">{same}</div>'
    )
