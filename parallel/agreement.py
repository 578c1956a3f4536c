"""Do two runs train the same thing? Largest relative deviations of their metrics, and what is allowed.

Nothing here imports torch. Layouts differ in the order of sums, so two of them differ by rounding: in FP32 by little,
in 16-bit formats by thousands of times more.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from parallel import frozen
from tracking import history


@dataclass(frozen=True)
class Deviation:
    """Largest relative deviation over the steps of a run, or what of it is allowed."""

    # Training loss of every step and the validation losses.
    loss: float
    # Gradient norm of every step.
    norm: float
    # Norm of the difference of all final master weights over their norm.
    weights: float

    def beyond(self, allowed: "Deviation") -> list[str]:
        """What is not within `allowed`, a few words each; NaN is never within."""
        names = {"loss": "loss", "norm": "gradient norm", "weights": "final weights"}
        pairs = [(word, getattr(self, name), getattr(allowed, name)) for name, word in names.items()]
        return [f"{word} {is_:.1e} > {may:.0e}" for word, is_, may in pairs if not is_ <= may]


FULL = Deviation(loss=1e-5, norm=1e-4, weights=1e-4)
# Norm and weights: about ten times the most that the protocol has found over all layouts (1.6e-4, 2.3e-3, 1.1e-3).
BF16 = Deviation(loss=2e-2, norm=2e-2, weights=1e-2)
# Formats with a loss scale, which may skip steps, or with fewer digits.
OTHER = Deviation(loss=2e-2, norm=2e-1, weights=5e-2)
TOLERANCES = {"fp32": FULL, "bf16": BF16}


def allowed(cfg) -> Deviation:
    """What rounding may do to 20 steps of a small model in the compute format of `cfg` (conf.schema.Config)."""
    return TOLERANCES.get(str(cfg.precision.compute), OTHER)


def of_metrics(ours: list[dict], reference: list[dict], *names: str) -> float:
    """Largest relative deviation of the named metrics over all lines; infinite when one run has what the other lacks.

    A value that is NaN or infinite in both (the gradient norm of a step that the loss scaler skipped) is the same.
    """
    worst = 0.0 if len(ours) == len(reference) else math.inf
    seen = 0
    for a, b in zip(ours, reference, strict=False):
        for name in names:
            if name in a or name in b:
                seen += 1
                worst = max(worst, _relative(a.get(name), b.get(name)))
    return worst if seen else math.inf


def _relative(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return math.inf
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    distance = abs(a - b) / abs(b) if b else math.inf
    return math.inf if math.isnan(distance) else distance


def first_step(ours: str | Path, reference: str | Path) -> list[str]:
    """What of loss and gradient norm of two runs' first step differs by more than rounding, empty when they agree.

    For whoever times runs: a time counts only when this is empty. Both arguments are run folders.
    """
    lines = [[line for line in history.read(folder) if line["step"] == 1] for folder in (ours, reference)]
    found = Deviation(of_metrics(*lines, "train/loss"), of_metrics(*lines, "grad/norm"), 0.0)
    return found.beyond(allowed(frozen.load(ours).cfg))
