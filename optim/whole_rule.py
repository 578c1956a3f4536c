"""What rules that look at whole tensors have in common."""

from collections.abc import Callable

import torch

from optim.moments import Kept
from optim.whole import Part, Whole


class WholeRule(torch.optim.Optimizer):
    """A rule over the parts of whole tensors; Megatron's wrapping steps it as any other torch optimizer.

    `whole` and `kept` are set once the wrapping knows which rank updates what; `start` then makes all moments.
    """

    whole: Whole
    kept: Kept
    # Moments that are whole tensors themselves, the same on every rank, along one axis of the parameter.
    factored: dict[str, int] = {}

    def start(self, whole: Whole, kept: Kept) -> None:
        """Make the moments, as zeros."""
        self.whole, self.kept = whole, kept
        for part in whole.parts:
            self.state[part.master] = {name: kept.zeros(like) for name, like in self.moments(part).items()}

    def moments(self, part: Part) -> dict[str, torch.Tensor]:
        """The names of a part's moments and a tensor of the shape of each."""
        return {"exp_avg": part.weights, "exp_avg_sq": part.weights}

    def count(self) -> int:
        """Count an update; which one it is, from 1. Kept in the groups, where checkpoints look for it."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return self.param_groups[0]["step"]

    def squares(self, update: Callable[[Part], torch.Tensor]) -> torch.Tensor:
        """Sums of squares of each tensor's weights and of its update: `[tensors, 2]`. All ranks must call it.

        `update` tells what is taken from a part's weights, before the learning rate and a factor of the whole tensor.
        """
        return self.whole.sums(lambda part: [t.float().square().sum() for t in (part.weights, update(part))], 2)

    def advance(self, part: Part) -> None:
        """Let Adam's two moments of a part see its gradient, in FP32 whatever format it comes in."""
        held, group, gradient = self.state[part.master], part.group, part.gradient.float()
        m, v = (self.kept.fetch(held[name], gradient) for name in ("exp_avg", "exp_avg_sq"))
        m.lerp_(gradient, 1 - group["betas"][0])
        v.mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1 - group["betas"][1])
        self.kept.store(held["exp_avg"], m)
        self.kept.store(held["exp_avg_sq"], v)

    def direction(self, part: Part) -> torch.Tensor:
        """Adam's update of a part before the learning rate: m̂ / (√v̂ + ε)."""
        held, group = self.state[part.master], part.group
        m, v = (self.kept.fetch(held[name], part.weights) for name in ("exp_avg", "exp_avg_sq"))
        first, second = (1 - beta ** group["step"] for beta in group["betas"])
        return (m / first).div_((v / second).sqrt_().add_(group["eps"]))
