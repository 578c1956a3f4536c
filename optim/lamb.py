"""LAMB: Adam with a step size for each tensor."""

import torch

from optim.whole import Part
from optim.whole_rule import WholeRule


class Lamb(WholeRule):
    """LAMB: Adam's update with decay, scaled tensor by tensor to the norm of the weights.

    You et al. 2020 (arXiv 1904.00962), algorithm 2, with φ the identity; the ratio is 1 where a norm is 0. The gradient
    is not clipped in here, as some implementations do unasked.
    """

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update this rank's parts. Every rank of the stage must call it."""
        self.count()
        for part in self.whole.parts:
            self.advance(part)
        weights, updates = self.squares(self.update).sqrt().unbind(1)
        ratios = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)
        for part in self.whole.parts:
            # Computed twice, so that not all updates are held at once.
            part.weights.sub_(self.update(part).mul_(ratios[part.number]), alpha=part.group["lr"])

    def update(self, part: Part) -> torch.Tensor:
        """Adam's, with decay."""
        return self.direction(part).add_(part.weights, alpha=part.group["weight_decay"])
