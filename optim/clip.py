"""One optimizer step with a bound on the gradient, in the order that loss scaling needs: unscale, norm, clip, update.

The norm is the L2 norm of the global gradient, each parameter counted once, before clipping. It is computed whatever
`clip` says, so that runs with and without clipping can be compared. Megatron's own `step()` skips it when clipping is
off; its parts, which are used here, do not.
"""

import math
from dataclasses import dataclass

from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from conf.schema import Clip, ClipKind


@dataclass
class Update:
    """What happened in one optimizer step."""

    # Global gradient norm before clipping; NaN when the loss scaler found an overflow.
    grad_norm: float
    # Factor the gradient was multiplied by, at most 1.
    clip_coef: float
    # The loss scaler found an overflow and the weights were left alone.
    skipped: bool


def coefficient(clip: Clip, grad_norm: float) -> float:
    """Factor by which the gradient is multiplied: min(1, max_norm / norm), Pascanu et al. 2013."""
    if clip.kind is ClipKind.none or not math.isfinite(grad_norm):
        return 1.0
    return min(1.0, clip.max_norm / (grad_norm + 1e-6))


def step(optimizer, clip: Clip) -> Update:
    """Unscale, look for overflow, measure, clip, update. The same on all ranks."""
    if optimizer.prepare_grads():
        return Update(grad_norm=math.nan, clip_coef=1.0, skipped=True)
    norm = float(optimizer.get_grad_norm())
    coef = coefficient(clip, norm)
    if coef < 1.0:
        parameters = optimizer.get_parameters()
        if parameters:
            clip_grad_by_total_norm_fp32(parameters, clip.max_norm, norm)
    optimizer.step_with_ready_grads()
    return Update(grad_norm=norm, clip_coef=coef, skipped=False)
