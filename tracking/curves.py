"""The curves of a run as a page of many runs shows them: few points, and every peak and every NaN still there."""

import math

from tracking import page
from tracking.runs import Run

# Title, metric, whether an average over some steps makes it easier to read.
CURVES = {
    "loss": ("Training loss", "train/loss", True),
    "val": ("Validation loss", "val/loss", False),
    "norm": ("Gradient norm before clipping", "grad/norm", True),
    "activation": ("Size of the last layer's output (root mean square, probed)", "amp/activation", False),
}
# Of all runs together; fewer for each when there are many, which then overlap anyhow.
MOST_POINTS = 30_000
SMOOTHED_SHARE = 0.02  # of the steps go into a smoothed value


def of_run(run: Run, runs: int) -> dict[str, dict]:
    """Each curve of one run among `runs`: `x` tokens, `t` seconds of training, `y` and `smooth`, None if not finite."""
    most = max(60, min(page.MOST_POINTS, MOST_POINTS // max(runs, 1)))
    lines = run.metrics()
    seconds, clock = 0.0, []
    for line in lines:
        spent = line.get("perf/step_s", 0.0)
        seconds += spent if math.isfinite(spent) else 0.0
        clock.append(seconds)
    found = {}
    for key, (_, metric, noisy) in CURVES.items():
        there = [i for i, line in enumerate(lines) if metric in line and math.isfinite(line.get("tokens", math.nan))]
        # uPlot needs x in order, which lines that a person has put together may not have.
        there.sort(key=lambda i: lines[i]["tokens"])
        values = [lines[i][metric] for i in there]
        if not values:
            continue
        keep = page.thin(values, most)
        curve = {
            "x": [int(lines[there[i]]["tokens"]) for i in keep],
            "t": [float(f"{clock[there[i]]:.6g}") for i in keep],
            "y": [page.rounded(values[i]) for i in keep],
        }
        if noisy:
            average = _smoothed(values, max(5, round(SMOOTHED_SHARE * len(values))))
            curve["smooth"] = [page.rounded(average[i]) for i in keep]
        found[key] = curve
    return found


def _smoothed(values: list[float], steps: int) -> list[float]:
    """Exponential average over about `steps` values, corrected for its start; what is not finite stays as it is."""
    decay = 1 - 1 / steps
    total = weight = 0.0
    averages = []
    for value in values:
        if math.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
            averages.append(total / weight)
        else:
            averages.append(value)
    return averages
