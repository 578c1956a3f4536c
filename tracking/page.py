"""Parts of a self-contained HTML page: figures, tables and charts, drawn without any network.

A page carries uPlot (https://github.com/leeoniya/uPlot, MIT, see assets/uPlot.LICENSE) and all its data.
"""

import json
import math
from html import escape
from pathlib import Path

ASSETS = Path(__file__).resolve().parent / "assets"
MOST_POINTS = 1500


def chart(title: str, x: list[float], series: list[dict], log: bool = False, from_zero: bool = False) -> dict:
    """A line chart. A series is {"label", "values"} with as many values as `x`, None or NaN for a gap.

    Optional in a series: "emphasis" (thick, with points), "dash", "color" (0 to 4). Long series are thinned out so that
    every extreme of the first one stays. `x` are tokens.
    """
    first, *others = (s["values"] for s in series)
    keep = set(thin(first))
    for values in others:
        known = [i for i, value in enumerate(values) if value is not None]
        if len(known) <= MOST_POINTS // 4:
            keep |= set(known)
    keep = sorted(keep)
    thinned = [s | {"values": [rounded(s["values"][i]) for i in keep]} for s in series]
    return {"title": title, "x": [x[i] for i in keep], "series": thinned, "log": log, "from_zero": from_zero}


def figures(items: list[tuple[str, str, str]]) -> str:
    """A row of large figures: label, value, small print."""
    cards = (
        f'<div class="card"><span class="soft">{escape(label)}</span><b>{escape(value)}</b>'
        f'<small class="soft">{escape(small)}</small></div>'
        for label, value, small in items
    )
    return f'<div class="figures">{"".join(cards)}</div>'


def table(rows: dict[str, object]) -> str:
    """Two columns, name and value; nothing for a value that is None."""
    cells = (
        f"<tr><th>{escape(str(name))}</th><td>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
        if value is not None
    )
    return f"<table>{''.join(cells)}</table>"


def card(title: str, content: str) -> str:
    """A titled section; `content` is HTML."""
    return f'<section class="card"><h2>{escape(title)}</h2>{content}</section>'


def folded(title: str, content: str) -> str:
    """A section that opens on a click; `content` is HTML."""
    return f'<section class="card"><details><summary>{escape(title)}</summary>{content}</details></section>'


def text(content: str) -> str:
    """Text as it is, line by line."""
    return f"<pre>{escape(content)}</pre>"


def places(charts: list[dict]) -> str:
    """Where charts.js draws each of the charts."""
    cards = "".join(
        f'<div class="card"><h2>{escape(one["title"])}</h2><div id="chart{i}"></div></div>'
        for i, one in enumerate(charts)
    )
    return f'<div class="charts">{cards}</div>'


def document(
    title: str, body: str, data: object, scripts: tuple[str, ...], styles: tuple[str, ...] = ("page.css",)
) -> str:
    """The whole page: HTML `body`, and `data` (as JSON) for `scripts`, of the assets, to draw."""
    # "<" cannot end the script element early when it is written like this.
    content = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<!-- uPlot, used by this page:
{_asset("uPlot.LICENSE")}-->
<style>{_asset("uPlot.min.css")}{"".join(map(_asset, styles))}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{content}</script>
<script>{_asset("uPlot.iife.min.js")}</script>
<script>{"".join(map(_asset, ("plots.js", *scripts)))}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def thin(values: list[float | None], most: int = MOST_POINTS) -> list[int]:
    """Which points to draw, about `most`: all, or of each stretch the lowest, the highest and the first not finite.

    None is no point and is kept only at the ends.
    """
    if len(values) <= most:
        return list(range(len(values)))
    stretch = math.ceil(2 * len(values) / most)
    keep = {0, len(values) - 1}
    for start in range(0, len(values), stretch):
        known = [i for i in range(start, min(start + stretch, len(values))) if values[i] is not None]
        finite = [i for i in known if math.isfinite(values[i])]
        if finite:
            keep |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(known):
            keep.add(next(i for i in known if not math.isfinite(values[i])))
    return sorted(keep)


def rounded(value: float | None) -> float | None:
    """Five digits are more than a screen shows; what is not finite is a gap."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")
