"""What runs reached against a number that was swept: final loss over learning rate, threshold or width, by the rest."""

from tracking import page
from tracking.differences import ranges
from tracking.runs import Run, finite, number, value_of

FEWEST = 3  # values of a number that make a curve
MOST_CURVES = 24
# Repetitions of one point, over which the average is taken.
REPEATED = ("train.seed",)
OUTCOMES = {"val_loss_final": "validation loss", "loss_final": "training loss"}


def charts(runs: list[Run], names: list[str]) -> list[dict]:
    """One chart for each of the labels `names` that is a number: `{"key", "label", "title", "log", "curves"}`.

    A curve is `{"name", "runs", "x", "y"}`: runs that differ in this number alone, by position in `runs`, in order of
    the number. Points that did not end well are left out.
    """
    outcome = next((name for name in OUTCOMES if any(finite(run.value(name)) for run in runs)), None)
    if outcome is None:
        return []
    found = []
    for position, key in enumerate(name for name in names if name not in REPEATED):
        xs = {run.number: number(value_of(run, key)) for run in runs if value_of(run, key)}
        values = set(xs.values())
        if None in values or len(values) < FEWEST:
            continue
        curves = _curves(runs, key, [name for name in names if name != key and name not in REPEATED], outcome)
        if curves and len(curves) <= MOST_CURVES:
            log = min(values) > 0 and max(values) >= 10 * min(values)
            title = f"Final {OUTCOMES[outcome]} against {key}"
            found.append({"key": f"outcome{position}", "label": key, "title": title, "log": log, "curves": curves})
    return found


def _curves(runs: list[Run], key: str, others: list[str], outcome: str) -> list[dict]:
    groups: dict[tuple, dict[float, list[int]]] = {}
    for place, run in enumerate(runs):
        if run.status == "ok" and finite(run.value(outcome)) and finite(value_of(run, key)):
            group = groups.setdefault(tuple(value_of(run, other) for other in others), {})
            group.setdefault(float(value_of(run, key)), []).append(place)
    curves = []
    for labels, points in groups.items():
        if len(points) < 2:
            continue
        xs = sorted(points)
        means = [sum(runs[place].value(outcome) for place in points[x]) / len(points[x]) for x in xs]
        numbers = ranges([runs[place].number for x in xs for place in points[x]])
        name = " · ".join(label for label in labels if label) or "all"
        curves.append(
            {
                "name": f"{name} (#{numbers})",
                "runs": [place for x in xs for place in points[x]],
                "x": xs,
                "y": [page.rounded(mean) for mean in means],
            }
        )
    return curves
