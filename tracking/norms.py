"""Watch the gradient norm, to adjust the clip threshold: its quantiles, and what each threshold would have clipped."""

import math
from array import array

import numpy as np

from optim.threshold import STANDARD

QUANTILES = (0.1, 0.5, 0.9, 0.99)
FEWEST = 10  # norms that a quantile says something about


class Norms:
    """The norms of a run, step by step; a norm that is not finite counts as clipped by nothing and is left out."""

    def __init__(self, report_every: int):
        self.report_every = report_every
        self._norms = array("d")

    def add(self, norm: float) -> bool:
        """Takes in the norm of a step; whether a report is due."""
        if math.isfinite(norm):
            self._norms.append(norm)
        return math.isfinite(norm) and len(self._norms) % self.report_every == 0

    def report(self, last: int | None = None) -> dict | None:
        """Quantiles and shares over the `last` norms or all of them; None when there are too few."""
        norms = np.array(self._norms[-last:] if last else self._norms)
        if len(norms) < FEWEST:
            return None
        quantiles = {f"p{100 * q:g}": float(np.quantile(norms, q)) for q in QUANTILES}
        return {
            "steps": len(norms),
            **quantiles,
            "max": float(norms.max()),
            "would_clip": {str(limit): float((norms > limit).mean()) for limit in STANDARD},
        }


def in_words(report: dict) -> str:
    """A report in two lines."""
    shares = ", ".join(f"{limit} {share:.0%}" for limit, share in report["would_clip"].items())
    return (
        f"median {report['p50']:.3g}, nine in ten below {report['p90']:.3g}, largest {report['max']:.3g} "
        f"(clip.max_norm={report['p90']:.2g} would clip one step in ten)\n"
        f"steps that each threshold would have clipped: {shares}"
    )
