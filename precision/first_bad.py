"""The first tensor of a global batch that is not finite: the same batch once more, with a look at every module.

Each rank looks at what its own innermost modules get, hold and give, forward and backward, one micro-batch after
another. The earliest of all ranks is the first: forward before backward, and in the order in which the stages compute.
Every rank must call these functions; all get the same answer.
"""

import re

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp

from models import loss
from parallel import checkpoint_state as state

TRAIL = 8  # modules shown before the first bad tensor
FORWARD, BACKWARD = 0, 1
GIVEN, HELD, MADE = "input", "weight", "output"


def find(chunks, micro_batches, train, clear) -> dict | None:
    """The first tensor that is not finite, None when the batch passes this time.

    `clear()` empties the gradients. The answer has direction, kind, module (layers counted from 0 over the whole
    model), tensor (in words), layer, rank, micro_batch, dtype, shape, bad (elements that are not finite, of how many),
    nan (whether one is NaN, else all are infinite), largest (finite magnitude in the look before) and trail.
    """
    # The interleaved schedule takes as many micro-batches as there are stages, or a multiple of it.
    at_once = parallel_state.get_pipeline_model_parallel_world_size() if len(chunks) > 1 else 1
    with loss.weights_complete(chunks):
        for start in range(0, len(micro_batches), at_once):
            clear()
            with Watcher(chunks, start) as watcher:
                loss.run(chunks, micro_batches[start : start + at_once], train, backward=True)
            found = [look for look in everywhere(watcher.first()) if look]
            if found:
                return min(found, key=lambda look: look["order"])
    return None


def everywhere(mine) -> list:
    """What every rank has, in the order of ranks."""
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


class Watcher:
    """Looks at every tensor that goes into, is held by, or comes out of the innermost modules while it is open."""

    def __init__(self, chunks, first_micro_batch: int = 0):
        self.looks: list[dict] = []
        self.handles = []
        self.first_micro_batch = first_micro_batch
        self.calls = dict.fromkeys(range(len(chunks)), -1)
        self.models = [_gpt(chunk) for chunk in chunks]

    def __enter__(self):
        for number, model in enumerate(self.models):
            self.handles.append(model.register_forward_pre_hook(self._counter(number)))
            for name, module in model.named_modules():
                if not any(True for _ in module.children()) and not isinstance(module, IdentityOp):
                    self._watch(module, _global_name(model, name), number)
            if model.post_process:
                self._watch(model, "loss", number, gives_only=True)
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()

    def _counter(self, number: int):
        def count(module, args):
            self.calls[number] += 1

        return count

    def _watch(self, module, name: str, number: int, gives_only: bool = False) -> None:
        def before(module, args, kwargs):
            for weight, tensor in module.named_parameters(recurse=False):
                self._look(tensor, name, f"{HELD}:{weight}", number)
            for tensor in _tensors((args, tuple(kwargs.values()))):
                self._look(tensor, name, GIVEN, number)

        def after(module, args, kwargs, out):
            for tensor in _tensors(out):
                self._look(tensor, name, MADE, number)

        if not gives_only:
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self.handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _look(self, tensor: torch.Tensor, module: str, kind: str, number: int) -> None:
        micro_batch = self.first_micro_batch + self.calls[number]
        self._note(tensor, module, kind, number, micro_batch, FORWARD)
        if tensor.requires_grad and torch.is_grad_enabled():
            look = lambda gradient: self._note(gradient, module, kind, number, micro_batch, BACKWARD)  # noqa: E731
            self.handles.append(tensor.register_hook(look))

    def _note(self, tensor, module: str, kind: str, number: int, micro_batch: int, direction: int) -> None:
        tensor = tensor.detach()
        finite = torch.isfinite(tensor)
        bad = tensor.numel() - int(finite.sum())
        largest = float(torch.where(finite, tensor, 0).abs().max()) if tensor.numel() else 0.0
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = number * stages + parallel_state.get_pipeline_model_parallel_rank()
        order = (micro_batch, direction, -stage if direction else stage, len(self.looks))
        look = dict(order=order, module=module, kind=kind, bad=bad, largest=largest)
        if bad:
            look |= dict(
                of=tensor.numel(),
                nan=bool(torch.isnan(tensor).any()),
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
            )
        self.looks.append(look)

    def first(self) -> dict | None:
        """The first bad look of this rank, told in words; None when all is finite."""
        ordered = sorted(self.looks, key=lambda look: look["order"])
        place = next((i for i, look in enumerate(ordered) if look["bad"]), None)
        if place is None:
            return None
        look, same = ordered[place], lambda other: other["order"][:3] == ordered[place]["order"][:3]
        before = [other for other in ordered[:place] if same(other)]
        after = [other for other in ordered[place:] if same(other) and other["bad"]]
        module, tensor = _in_words(look, before, after)
        layer = re.search(r"layers\.(\d+)", module)
        trail = [f"{other['module']} {_side(other)}: {other['largest']:.3g}" for other in before[-TRAIL:]]
        known = {name: look[name] for name in ("order", "kind", "bad", "of", "nan", "dtype", "shape")}
        return known | dict(
            direction="backward" if look["order"][1] else "forward",
            module=module,
            tensor=tensor,
            layer=int(layer.group(1)) if layer else None,
            rank=dist.get_rank(),
            micro_batch=look["order"][0],
            largest=before[-1]["largest"] if before else None,
            trail=trail,
        )


def _in_words(look: dict, before: list[dict], after: list[dict]) -> tuple[str, str]:
    """The module in which it came about, and what the tensor is."""
    module, kind = look["module"], look["kind"]
    last = before[-1]["module"] if before else None
    if look["order"][1] == FORWARD:
        if kind.startswith(HELD):
            return module, f"{module}.{kind.partition(':')[2]}"
        if kind == GIVEN and last not in (None, module):
            return _between(last, module), f"input of {module}, made from the output of {last}"
        return module, f"{kind} of {module}"
    if kind.startswith(HELD):
        return module, f"gradient of {module}.{kind.partition(':')[2]}"
    if last is None:
        return module, f"gradient of the {kind} of {module}, as it came from the loss or the next stage"
    if any(other["module"] == last and other["kind"] == GIVEN for other in after):
        return last, f"gradient of the input of {last}"
    return _between(last, module), f"gradient of the {kind} of {module}, on the way back from {last}"


def _between(one: str, other: str) -> str:
    """The module that holds both."""
    shared = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        shared.append(a)
    return ".".join(shared) or other


def _side(look: dict) -> str:
    return ("gradient of " if look["order"][1] else "") + (look["kind"].partition(":")[2] or look["kind"])


def _tensors(value):
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _gpt(chunk) -> GPTModel:
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def _global_name(model: GPTModel, name: str) -> str:
    """The name with the layer's number in the whole model, from 0, instead of that in this stage."""
    match = re.match(r"decoder\.layers\.(\d+)(.*)", name)
    if not match:
        return name
    layer = model.decoder.layers[int(match.group(1))]
    return f"decoder.layers.{layer.layer_number - 1}{match.group(2)}"


@torch.no_grad()
def kept(chunks, optimizer, zero: int) -> dict:
    """What lies between two steps: {"bad": weights and moments that are not finite, "largest": ..., "spread": ...}.

    `bad` is a list of dicts with name (layers counted from 0), state ("weights", "exp_avg", ...), rank, bad, of;
    `largest` is the weight of the greatest magnitude and `spread` the smallest and largest root mean square of a
    matrix, each as [value, name].
    """
    bad, largest, spread = [], [], []
    for part in state.owned(chunks, optimizer, zero):
        held = {"weights": part.master} | part.rule.state.get(part.master, {})
        for name, tensor in held.items():
            if not (torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.numel() == part.master.numel()):
                continue
            flat = state.local(tensor)
            finite = torch.isfinite(flat)
            if not finite.all():
                at = part.start + int((~finite).to(torch.uint8).argmax())
                bad.append(
                    dict(
                        name=_place_name(part.places, at),
                        state=name,
                        rank=dist.get_rank(),
                        bad=int((~finite).sum()),
                        of=flat.numel(),
                    )
                )
            elif name == "weights" and flat.numel():
                where = _place_name(part.places, part.start)
                largest.append([float(flat.abs().max()), where])
                if len(part.places[0].shape) > 1:
                    spread.append([float(flat.float().square().mean().sqrt()), where])
    told = everywhere((bad, max(largest, default=None), [min(spread, default=None), max(spread, default=None)]))
    ends = [end for _, _, ends in told for end in ends if end]
    return {
        "bad": [entry for entries, _, _ in told for entry in entries],
        "largest": max((most for _, most, _ in told if most), default=None),
        "spread": [min(ends), max(ends)] if ends else None,
    }


def _place_name(places, at: int) -> str:
    place = next((place for place in places if place.start <= at < place.end), places[0])
    return place.key.replace("layers.", f"layers.{place.offset[0]}.", 1) if place.prepended else place.key


@torch.no_grad()
def gradients(chunks, zero: int) -> list[dict]:
    """Gradients that are not finite after their reduction, as dicts with name and rank."""
    found = []
    for chunk in chunks:
        if zero >= 2:
            named = [(p.orig_param, p.grad) for _, p in chunk.module.param_and_grad_buffer.optimizer_named_parameters]
        else:
            named = [(p, p.main_grad) for p in chunk.parameters()]
        for p, gradient in named:
            if gradient is None:
                continue
            finite = torch.isfinite(state.local(gradient))
            if not finite.all():
                found.append(dict(name=_place_name(p.places, 0), rank=dist.get_rank(), bad=int((~finite).sum())))
    return [entry for entries in everywhere(found) for entry in entries]
