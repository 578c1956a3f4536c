"""Numeric probes: what the number formats lose, layer by layer, in every `probe.every`-th step.

A rank measures what it holds: gradients and updates of the weights that it updates, activations of its layers. The
table of all layers is then added up over all ranks, so that it says the same under every layout. In the steps between,
and with probes off, nothing is hooked and nothing is computed.
"""

import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerLayer

from conf.schema import Compute, Config, Format
from models.gpt import DTYPES
from parallel.checkpoint_state import local, owned
from precision.reference import Reference

# Columns of the table that are added up over ranks; a row is the embedding, a layer, or the output (with its norm).
ADDED = ("elements", "zeros", "overflows", "squares", "updates", "lost", "error", "exact", "outputs", "out_squares")
LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
EXPONENTS = 256  # values that the exponent field of an FP32 number has


class Probe:
    """`begin`, `gradients` and `end` are called in every step, by every rank, and do something in a probed one."""

    def __init__(self, cfg: Config, chunks, optimizer):
        n = cfg.precision
        self.every, self.chunks, self.optimizer = cfg.probe.every, chunks, optimizer
        self.zero, self.layers = cfg.parallel.zero, cfg.model.layers
        self.format = cfg.probe.format or (Format.fp32 if n.compute is Compute.tf32 else n.params)
        self.dtype = DTYPES[self.format]
        # Dropout draws other numbers in the recomputation, and FP32 is its own.
        compared = n.compute is not Compute.fp32 and not cfg.model.dropout
        self.reference = Reference(cfg) if self.every and compared else None
        digits = len(str(self.layers))
        self.rows = ["embedding", *(f"layer{i:0{digits}}" for i in range(1, self.layers + 1)), "output"]
        self.hooks: list | None = None

    def begin(self, step: int) -> None:
        """Before the forward pass: watch the layers when `step` is probed."""
        if not self.every or step % self.every:
            return
        self.spent = -time.perf_counter()
        self.table = torch.zeros(len(self.rows), len(ADDED), dtype=torch.float64, device="cuda")
        self.largest = torch.zeros(len(self.rows), device="cuda")
        self.exponents = torch.zeros(EXPONENTS, dtype=torch.float64, device="cuda")
        self.compared: set[int] = set()
        self.hooks, self.before = [], []
        for layer in (m for chunk in self.chunks for m in chunk.modules() if isinstance(m, TransformerLayer)):
            watch = self._watch(layer.layer_number)
            modules = [layer.get_submodule(name) for name in LINEAR]
            self.hooks += [module.register_forward_hook(watch) for module in [layer, *modules]]
            if self.reference and parallel_state.get_data_parallel_rank() == 0:
                # First, because ZeRO-3 takes the weights away in a hook of its own.
                self.hooks.append(layer.register_forward_hook(self._compare, prepend=True, with_kwargs=True))
        self.spent += time.perf_counter()

    def _unhook(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def _watch(self, row: int):
        @torch.no_grad()
        def watch(module, args, output):
            self.largest[row] = torch.maximum(self.largest[row], output[0].abs().amax().float())
            if isinstance(module, TransformerLayer):  # ranks that hold copies of it add to both
                self._add(row, outputs=output[0].numel(), out_squares=output[0].float().square().sum())

        return watch

    def _compare(self, layer, args, kwargs, output) -> None:
        """The first sequence of the global batch through the layer again, in FP32; the same one in every layout."""
        if layer.layer_number in self.compared:
            return
        began = time.perf_counter()
        self.compared.add(layer.layer_number)
        error, exact = self.reference.compare(layer, args, kwargs, output[0])
        self._add(layer.layer_number, error=error, exact=exact)
        self.spent += time.perf_counter() - began

    @torch.no_grad()
    def gradients(self, scale: float) -> None:
        """After unscaling, before clipping: what of the gradient, times the loss scale, the format does not hold."""
        if self.hooks is None:
            return
        self.spent -= time.perf_counter()
        self._unhook()
        for part, row in self._parts():
            if part.master.grad is None:
                continue
            gradient = local(part.master.grad).float()
            self._add(row, squares=gradient.square().sum())
            if row == 0:  # rows of tokens that the batch lacks are zero for another reason
                continue
            scaled = gradient * scale
            held = scaled.to(self.dtype)
            finite = held.isfinite()
            self._add(row, elements=held.numel(), zeros=(held == 0).sum(), overflows=(~finite).sum())
            self.exponents += torch.bincount(scaled.view(torch.int32) >> 23 & 255, minlength=EXPONENTS)
            self.before.append((part, row, local(part.master).clone()))
        self.spent += time.perf_counter()

    @torch.no_grad()
    def end(self, updated: bool) -> tuple[dict[str, float], dict]:
        """After the update: metrics and histograms of a probed step, the same on all ranks; none of another step."""
        if self.hooks is None:
            return {}, {}
        if self.hooks:  # the loss was not finite, so there was no gradient to look at
            self._unhook()
            self.hooks = None
            return {}, {}
        began = time.perf_counter()
        for part, row, before in self.before if updated else []:
            self._add(row, updates=before.numel(), lost=(local(part.master) == before).sum())
        dist.all_reduce(self.table)
        dist.all_reduce(self.largest, dist.ReduceOp.MAX)
        dist.all_reduce(self.exponents)
        self.hooks = self.before = None
        found = self._metrics()
        return found | {"probe/cost_s": self.spent + time.perf_counter() - began}, self._histogram()

    def _histogram(self) -> dict[str, tuple[list[float], list[int]]]:
        """How many elements of the scaled gradient have which exponent, 2^e to 2^(e+1): counts and edges."""
        counts = self.exponents.tolist()
        there = [i for i, count in enumerate(counts) if count and 0 < i < EXPONENTS - 1] or [127]
        first, last = there[0], there[-1] + 1
        return {"probe/gradient_exponent": (counts[first:last], [i - 127 for i in range(first, last + 1)])}

    def _parts(self):
        """What this rank updates and counts, with its row: of copies the first one counts."""
        if self.zero == 0 and parallel_state.get_data_parallel_rank(with_context_parallel=True):
            return
        for part in owned(self.chunks, self.optimizer, self.zero):
            place = part.places[0]
            if place.writes:
                yield part, self._row(place)

    def _row(self, place) -> int:
        if place.prepended:
            return place.offset[0] + 1
        return 0 if place.key.startswith("embedding.") else len(self.rows) - 1

    def _add(self, row: int, **columns) -> None:
        for name, value in columns.items():
            self.table[row, ADDED.index(name)] += value

    def _metrics(self) -> dict[str, float]:
        table = self.table.tolist()
        rows = [dict(zip(ADDED, row, strict=True)) for row in table]
        found, largest = {}, self.largest.tolist()
        for name, row, most in zip(self.rows, rows, largest, strict=True):
            found |= {f"probe/{what}/{name}": value for what, value in _shares(row).items()}
            if name.startswith("layer"):
                found[f"probe/largest_activation/{name}"] = most
        whole = {column: sum(row[column] for row in rows[1:]) for column in ADDED}
        total = _shares(whole)
        names = {"underflow": "underflow_fraction", "overflow": "overflow_fraction", "lost_updates": "lost_updates"}
        found |= {f"amp/{told}": total[what] for what, told in names.items() if what in total}
        found["amp/largest_activation"] = max(largest)
        last = f"probe/activation/{self.rows[-2]}"
        found |= {"amp/activation": found[last]} if last in found else {}
        errors = [value for name, value in found.items() if name.startswith("probe/relative_error/")]
        return found | ({"amp/relative_error": max(errors)} if errors else {})


def _shares(row: dict[str, float]) -> dict[str, float]:
    """What is logged of a row; what it cannot tell is left out."""
    found = {"grad_norm": row["squares"] ** 0.5}
    if row["elements"]:
        found["underflow"] = row["zeros"] / row["elements"]
        found["overflow"] = row["overflows"] / row["elements"]
    if row["updates"]:
        found["lost_updates"] = row["lost"] / row["updates"]
    if row["outputs"]:
        found["activation"] = (row["out_squares"] / row["outputs"]) ** 0.5
    if row["exact"]:
        found["relative_error"] = (row["error"] / row["exact"]) ** 0.5
    return found


def note(cfg: Config, probe: Probe) -> dict[str, str]:
    """The row about probes of the block before the first step; none when they are off."""
    if not cfg.probe.every:
        return {}
    return {"probes": f"every {cfg.probe.every} steps, in {probe.format.value}; probe/cost_s is what one takes"}
