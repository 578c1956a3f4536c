"""Whole tensors of which each rank updates a piece: sums over them, and the tensors themselves.

LAMB needs the norm of a weight matrix, Adafactor the sums of its rows and columns, Muon the matrix, and clipping by
layer the norm of its gradient. Tensor parallelism and ZeRO leave each rank a flat range of it, so these are added up
over the ranks of the pipeline stage. A tensor is what the model's state dict names: queries, keys and values of a layer
are one, and so are the two halves of a gated MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from conf.schema import Config
from parallel.checkpoint_map import boxes
from parallel.checkpoint_state import local, optimizers, owned


@dataclass(frozen=True)
class Tensor:
    """A tensor of this pipeline stage, as the whole model has it."""

    key: str
    shape: tuple[int, ...]


@dataclass
class Part:
    """The flat range of one tensor that this rank updates."""

    number: int
    tensor: Tensor
    # Where the range lies in the tensor: for each box of it an index of the tensor, its shape, and its flat range here.
    places: list[tuple[tuple[slice, ...], tuple[int, ...], slice]]
    # Of copies on tensor-parallel ranks the first one counts.
    counts: bool
    # Master weights as the optimizer holds them, and its parameter group.
    master: torch.Tensor
    group: dict

    @property
    def weights(self) -> torch.Tensor:
        """Master weights of the range, flat, a view."""
        return local(self.master)

    @property
    def gradient(self) -> torch.Tensor:
        """Gradient of the range, flat, a view."""
        return local(self.master.grad)


class Whole:
    """All tensors of this stage, in an order that its ranks share, and the parts of them that this rank updates."""

    def __init__(self, chunks, optimizer, cfg: Config):
        zero = cfg.parallel.zero
        if zero:
            self.ranks = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        else:
            self.ranks = parallel_state.get_tensor_model_parallel_group()
        numbers: dict[tuple, int] = {}
        self.tensors: list[Tensor] = []
        for place in (place for chunk in chunks for p in _parameters(chunk, zero) for place in p.places):
            if _name(place) not in numbers:
                numbers[_name(place)] = len(numbers)
                self.tensors.append(Tensor(place.key, place.global_shape[place.prepended :]))
        rules = [part.optimizer for part in optimizers(optimizer)]
        groups = {id(p): group for rule in rules for group in rule.param_groups for p in group["params"]}
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        self.parts: list[Part] = []
        for held in owned(chunks, optimizer, zero):
            number = numbers[_name(held.places[0])]
            tensor, places = self.tensors[number], []
            for place in held.places:
                for box in boxes(place, held.start, held.end):
                    offset, shape = box.offset[place.prepended :], box.shape[place.prepended :]
                    index = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
                    places.append((index, shape, slice(box.first, box.last)))
            split = held.places[0].shape != tensor.shape
            self.parts.append(Part(number, tensor, places, split or first, held.master, groups[id(held.master)]))
        self.part_of = {part.number: part for part in self.parts}

    def add_up(self, buffer: torch.Tensor) -> torch.Tensor:
        """Sum of a buffer over the ranks of the stage, in place. All of them must call it."""
        if self.ranks.size() > 1:
            dist.all_reduce(buffer, group=self.ranks)
        return buffer

    def sums(self, of: Callable[[Part], list[torch.Tensor]], count: int) -> torch.Tensor:
        """Sums over each tensor of the `count` numbers that `of` tells of a part: `[tensors, count]`."""
        total = torch.zeros(len(self.tensors), count, device="cuda")
        for part in self.parts:
            values = torch.stack(of(part))
            if part.counts:
                total[part.number] = values
        return self.add_up(total)

    def assemble(self, number: int, flat: torch.Tensor | None) -> torch.Tensor:
        """A whole tensor from this rank's flat range of it, None where it has none. All ranks must call it."""
        part, whole = self.part_of.get(number), torch.zeros(self.tensors[number].shape, device="cuda")
        if part is not None and part.counts:
            for index, shape, range_ in part.places:
                whole[index] = flat[range_].view(shape)
        return self.add_up(whole)

    def cut(self, part: Part, whole: torch.Tensor) -> torch.Tensor:
        """This rank's flat range of a whole tensor."""
        flat = torch.empty(part.weights.shape, device=whole.device)
        for index, shape, range_ in part.places:
            flat[range_].view(shape).copy_(whole[index])
        return flat


def _parameters(chunk, zero: int):
    if zero >= 2:
        return [p.orig_param for _, p in chunk.module.param_and_grad_buffer.optimizer_named_parameters]
    return chunk.parameters()


def _name(place) -> tuple:
    return place.key, place.offset[: place.prepended]
