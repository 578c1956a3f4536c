"""Adafactor: a second moment kept as one number a row and one a column."""

import torch

from optim.whole import Part
from optim.whole_rule import WholeRule


class Adafactor(WholeRule):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5) without a first moment.

    Step sizes are relative to the root mean square of the tensor, at least `floor`, times min(lr, 1/√t); updates are
    clipped to a root mean square of `update_clip`. As in torch.optim.Adafactor, ε₁ is FP32's. Rows and columns are
    those of the whole matrix: each rank adds its part of their sums, and keeps both vectors of a matrix it updates.
    """

    factored = {"row_var": 0, "col_var": 1}

    def __init__(self, params, lr: float, beta2_decay: float, update_clip: float, floor: float):
        super().__init__(params, dict(lr=lr, weight_decay=0.0))
        self.beta2_decay, self.update_clip, self.floor = beta2_decay, update_clip, floor
        self.tiny = torch.finfo(torch.float32).eps

    def moments(self, part: Part) -> dict[str, torch.Tensor]:
        """One number a row and one a column of a matrix; of a vector a number for each element."""
        if len(part.tensor.shape) == 1:
            return {"variance": part.weights}
        rows, columns = part.tensor.shape
        return {"row_var": part.weights.new_empty(rows), "col_var": part.weights.new_empty(columns)}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update this rank's parts. Every rank of the stage must call it."""
        step = self.count()
        new = step**self.beta2_decay
        rows_and_columns = self._sums_of_squares()
        for part in self.whole.parts:
            held = self.state[part.master]
            if "variance" in held:
                held["variance"].lerp_(part.gradient.float().square(), new)
                continue
            (rows, columns), shape = rows_and_columns[part.number], part.tensor.shape
            held["row_var"].lerp_(rows / shape[1], new)
            held["col_var"].lerp_(columns / shape[0], new)
        sizes = torch.tensor([torch.Size(t.shape).numel() for t in self.whole.tensors], device="cuda").unsqueeze(1)
        weights, updates = (self.squares(self.update) / sizes).sqrt().unbind(1)
        scales = weights.clamp(min=self.floor) / (updates / self.update_clip).clamp(min=1.0)
        for part in self.whole.parts:
            lr, update = part.group["lr"], self.update(part)
            part.weights.mul_(1 - lr * part.group["weight_decay"])
            part.weights.sub_(update.mul_(scales[part.number]), alpha=min(lr, step**-0.5))

    def _sums_of_squares(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Of every matrix of the stage the sums of its gradient's squares, over each row and over each column."""
        matrices = [(n, t.shape) for n, t in enumerate(self.whole.tensors) if len(t.shape) == 2]
        buffer = torch.zeros(sum(rows + columns for _, (rows, columns) in matrices), device="cuda")
        ends = iter(buffer.split([size for _, shape in matrices for size in shape]))
        found = {number: (next(ends), next(ends)) for number, _ in matrices}
        for part in self.whole.parts:
            if part.number not in found or not part.counts:
                continue
            rows, columns = found[part.number]
            for (at_rows, at_columns), shape, range_ in part.places:
                square = part.gradient[range_].view(shape).float().square()
                rows[at_rows] += square.sum(1)
                columns[at_columns] += square.sum(0)
        self.whole.add_up(buffer)
        return found

    def update(self, part: Part) -> torch.Tensor:
        """The gradient over the root of its estimated second moment."""
        held, gradient = self.state[part.master], part.gradient.float()
        if "variance" in held:
            return held["variance"].clamp(min=self.tiny**2).rsqrt_().mul_(gradient)
        rows, columns, update = held["row_var"], held["col_var"], torch.empty_like(gradient)
        mean = rows.mean().clamp(min=self.tiny)
        for (at_rows, at_columns), shape, range_ in part.places:
            variance = torch.outer(rows[at_rows], columns[at_columns]).div_(mean)
            scale = variance.clamp_(min=self.tiny**2).rsqrt_()
            update[range_] = scale.mul_(gradient[range_].view(shape)).view(-1)
        return update
