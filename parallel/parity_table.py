"""What the parity protocol prints: a line a point while it runs, and tables in Markdown."""

from parallel.parity_points import CASES, Point

COLUMNS = ("loss", "grad norm", "weights")


def head() -> str:
    """Titles over the columns of `row`."""
    return f"{'':<6} {'case':<10} {'layout':<11} {'ranks':>5}  " + "  ".join(f"{name:>9}" for name in COLUMNS)


def row(point: Point) -> str:
    """A point in one line."""
    start = f"{point.precision:<6} {point.case:<10} {point.layout:<11} {point.world_size or '-':>5}  "
    if point.problems:
        return f"{start}not run: {' '.join(point.problems)}"
    figures = "  ".join(f"{figure:>9.1e}" for figure in point.found)
    if point.failed:
        return f"{start}{figures}  FAILED: {'; '.join(point.failed)}"
    return f"{start}{figures}  ok" if point.found else f"{start}the reference of those below"


def markdown(points: list[Point]) -> str:
    """The first case: layouts down, formats across. Then every other case: the worst of its layouts."""
    compared = [point for point in points if not point.is_reference]
    first = compared[0].case
    formats = list(dict.fromkeys(point.precision for point in compared))
    titles = [f"{name.upper()} {column}" for name in formats for column in COLUMNS]
    lines = [f"| layout | ranks | {' | '.join(titles)} |", "|---|---|" + "---|" * len(titles)]
    for layout in dict.fromkeys(point.layout for point in compared if point.case == first):
        own = [point for point in compared if (point.case, point.layout) == (first, layout)]
        cells = [cell for name in formats for cell in _cells([point for point in own if point.precision == name])]
        lines.append(f"| `{layout}` | {own[0].world_size or ''} | {' | '.join(cells)} |")
    others = [point for point in compared if point.case != first]
    if others:
        lines += ["", f"| case | layouts | {' | '.join(titles)} |", "|---|---|" + "---|" * len(titles)]
    for case in dict.fromkeys(point.case for point in others):
        own = [point for point in others if point.case == case and not point.problems]
        cells = [cell for name in formats for cell in _cells([point for point in own if point.precision == name])]
        tried = " ".join(f"`{layout}`" for layout in dict.fromkeys(point.layout for point in own))
        lines.append(f"| {CASES[case].title} | {tried} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(points: list[Point]) -> list[str]:
    """The worst loss, gradient norm and weights of these points, in bold where a point failed."""
    measured = [point.found for point in points if point.found]
    if not measured:
        said = "**failed**" if any(point.failed for point in points) else "not legal" if points else ""
        return [said] * len(COLUMNS)
    failed = any(point.failed for point in points)
    return [f"**{max(column):.1e}**" if failed else f"{max(column):.1e}" for column in zip(*measured, strict=True)]
