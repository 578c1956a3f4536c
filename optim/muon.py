"""Muon for the matrices inside the layers, AdamW for the rest."""

import torch
from emerging_optimizers.orthogonalized_optimizers.muon import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from emerging_optimizers.utils import fp32_matmul_precision

from conf.schema import Activation, Compute, Config
from optim.whole import Part, Tensor
from optim.whole_rule import WholeRule

# As AdamW's update, which has a root mean square of 0.2 to 0.4 (Liu et al. 2025, section 2.2).
UPDATE_RMS = 0.2


class Muon(WholeRule):
    """Muon (Jordan et al. 2024) scaled to the size of AdamW's updates (Liu et al. 2025, arXiv 2502.16982).

    The momentum of a matrix is made orthogonal by five Newton-Schulz steps of emerging-optimizers and multiplied by
    0.2·√(larger side), so learning rate and decay are AdamW's. Embeddings, output layer, norms and biases get AdamW.
    Queries, keys, values and the two halves of a gated MLP, which Megatron stores as one matrix each, are matrices of
    their own here. A rank has only a piece of a matrix under tensor parallelism or ZeRO: all ranks of the stage put the
    momentum together and compute the same, so the result does not depend on the layout.
    """

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float, momentum: float, cfg: Config):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.momentum, self.steps, self.model = momentum, cfg.optimizer.newton_schulz_steps, cfg.model
        # Precision of the matrix products: that of the run; half precision is BF16 here, as in the original.
        self.precision = {Compute.fp32: "highest", Compute.tf32: "high"}.get(cfg.precision.compute, "medium")

    def moments(self, part: Part) -> dict[str, torch.Tensor]:
        """Momentum, or Adam's two moments."""
        return {"momentum_buffer": part.weights} if is_inner_matrix(part.tensor) else super().moments(part)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update this rank's parts. Every rank of the stage must call it."""
        self.count()
        for number, tensor in enumerate(self.whole.tensors):
            part = self.whole.part_of.get(number)
            if is_inner_matrix(tensor):
                update = self._orthogonal(tensor, self.whole.assemble(number, part and self._momentum(part)))
                update = part and self.whole.cut(part, update)
            elif part:
                self.advance(part)
                update = self.direction(part)
            if part:
                lr = part.group["lr"]
                part.weights.mul_(1 - lr * part.group["weight_decay"]).sub_(update, alpha=lr)

    def _momentum(self, part: Part) -> torch.Tensor:
        """Nesterov's: the average of the gradients, looked at one step ahead."""
        held, gradient = self.state[part.master]["momentum_buffer"], part.gradient.float()
        average = self.kept.fetch(held, gradient)
        average.lerp_(gradient, 1 - self.momentum)
        self.kept.store(held, average)
        return gradient.lerp(average, self.momentum)

    def _orthogonal(self, tensor: Tensor, momentum: torch.Tensor) -> torch.Tensor:
        update = torch.empty_like(momentum)
        with fp32_matmul_precision(self.precision):
            for rows in self._matrices(tensor):
                matrix = momentum[rows]
                scale = UPDATE_RMS * get_muon_scale_factor(*matrix.shape, mode="spectral")
                update[rows] = newton_schulz(matrix, self.steps, "simple").mul_(scale)
        return update

    def _matrices(self, tensor: Tensor) -> list[torch.Tensor]:
        """The rows of each matrix that is stored in this one."""
        rows, m = torch.arange(tensor.shape[0], device="cuda"), self.model
        if tensor.key.endswith("linear_qkv.weight"):  # for each key-value head its queries, its key, its value
            head = m.hidden // m.heads
            sizes = [head * (m.heads // m.kv_heads), head, head]
            return [part.flatten() for part in rows.view(m.kv_heads, -1).split(sizes, dim=1)]
        if tensor.key.endswith("linear_fc1.weight") and m.activation is Activation.swiglu:
            return list(rows.chunk(2))
        return [rows]


def is_inner_matrix(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix inside a layer: no embedding, no output layer, no norm, no bias."""
    return len(tensor.shape) == 2 and not tensor.key.startswith(("embedding.", "output_layer."))
