"""One optimizer step with a bound on the gradient, in the order that loss scaling needs: unscale, norm, clip, update.

The norm is the L2 norm of the global gradient, each parameter counted once, before clipping. It is computed whatever
`clip` says, so that runs with and without clipping can be compared. Megatron's own `step()` skips it when clipping is
off; its parts, which are used here, do not.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from conf.schema import ClipKind, Config
from optim.whole import Whole
from parallel.checkpoint_state import local


@dataclass
class Update:
    """What happened in one optimizer step."""

    # Global gradient norm before clipping; NaN when the loss scaler found an overflow. When it is not finite, the
    # weights were left alone.
    grad_norm: float
    # Global norm after clipping over that before, at most 1.
    clip_coef: float
    # The loss scaler found an overflow and the weights were left alone.
    skipped: bool
    # The norm was far above the recent ones and the weights were left alone; None when nobody looks.
    spike: bool | None = None
    # Bound on the global norm in this step, None where there is none.
    threshold: float | None = None


# A step whose gradient is not used.
LEFT_OUT = Update(grad_norm=math.nan, clip_coef=1.0, skipped=False)


def coefficient(threshold: float | None, grad_norm: float) -> float:
    """Factor by which the gradient is multiplied: min(1, threshold / norm), Pascanu et al. 2013."""
    if threshold is None or not math.isfinite(grad_norm) or grad_norm <= threshold:
        return 1.0
    return threshold / (grad_norm + 1e-6)


class Clipper:
    """Steps the optimizer with the bound that the group `clip` says; every rank has one and comes to the same."""

    def __init__(self, cfg: Config, chunks, optimizer):
        self.clip, self.optimizer = cfg.clip, optimizer
        self.whole = Whole(chunks, optimizer, cfg) if cfg.clip.kind is ClipKind.per_layer else None
        judged = self.clip.skip_window if self.clip.skip_above is not None else 0
        # Recent norms; in a checkpoint, so that a resumed run takes the decisions of one that was not interrupted.
        self.norms: deque[float] = deque(maxlen=max(self.clip.window or 0, judged))

    def step(self, measure: Callable[[], None] = lambda: None) -> Update:
        """Unscale, look for overflow, measure, clip, update. The same on all ranks.

        `measure` is called with the unscaled gradient in place, before it is clipped.
        """
        overflow = self.optimizer.prepare_grads()
        measure()
        if overflow:
            return Update(grad_norm=math.nan, clip_coef=1.0, skipped=True)
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):  # the weights are left alone; precision.nonfinite says what becomes of the step
            return Update(grad_norm=norm, clip_coef=1.0, skipped=False)
        spike = self._is_spike(norm)
        self.norms.append(norm)
        threshold = self._threshold()
        coef = 1.0 if spike else self._clip(norm, threshold)
        if not spike:
            self.optimizer.step_with_ready_grads()
        return Update(norm, coef, skipped=False, spike=spike, threshold=threshold)

    def _is_spike(self, norm: float) -> bool | None:
        """OLMo-core's rule (SkipStepOptimizer): so many standard deviations above the mean of the recent norms."""
        if self.clip.skip_above is None:
            return None
        recent = list(self.norms)[-self.clip.skip_window :]
        if len(recent) < max(2, self.clip.skip_window // 2):
            return False
        return not norm <= np.mean(recent) + self.clip.skip_above * np.std(recent, ddof=1)

    def _threshold(self) -> float | None:
        if self.clip.kind in (ClipKind.fixed, ClipKind.by_model_size):
            return self.clip.max_norm
        if self.clip.kind is ClipKind.adaptive and self.norms:
            # AutoClip: a quantile of the unclipped norms, this step's included.
            return float(np.quantile(list(self.norms)[-self.clip.window :], self.clip.quantile))
        return None

    @torch.no_grad()
    def _clip(self, norm: float, threshold: float | None) -> float:
        if self.clip.kind is ClipKind.none:
            return 1.0
        if threshold is not None:
            coef = coefficient(threshold, norm)
            parameters = self.optimizer.get_parameters() if coef < 1.0 else []
            if parameters:
                # Without master weights gradients are BF16, which Megatron takes from the other place only.
                decoupled = parameters[0].dtype is not torch.float32
                clip_grad_by_total_norm_fp32(parameters, threshold, norm, use_decoupled_grad=decoupled)
            return coef
        if self.clip.kind is ClipKind.per_layer:
            norms = self.whole.sums(lambda part: [part.gradient.float().square().sum()], 1).sqrt()
            factors = (self.clip.max_norm / (norms + 1e-6)).clamp(max=1.0)
            for part in self.whole.parts:
                part.gradient.mul_(factors[part.number])
        else:
            for parameter in self.optimizer.get_parameters():
                if parameter.grad is not None:
                    local(parameter.grad).clamp_(-self.clip.max_value, self.clip.max_value)
        return min(1.0, float(self.optimizer.get_grad_norm()) / norm) if norm else 1.0


def note(cfg: Config) -> str:
    """What the chosen bound is, for the block before the first step."""
    clip = cfg.clip
    said = {
        ClipKind.none: "none",
        ClipKind.fixed: f"global norm at most {clip.max_norm}",
        ClipKind.by_model_size: f"global norm at most {clip.max_norm}, by the field note's rule for this model's size",
        ClipKind.adaptive: f"global norm at most the {clip.quantile} quantile of the last {clip.window} (AutoClip)",
        ClipKind.per_layer: f"norm of each tensor at most {clip.max_norm}",
        ClipKind.by_value: f"each element at most {clip.max_value}",
    }[clip.kind]
    if clip.skip_above is not None:
        said += f"; steps whose norm is {clip.skip_above} standard deviations above the recent mean are skipped"
    return said
