"""Where each parameter of this rank lies in the whole model, as boxes of global tensors that no layout shows in.

Before a model chunk is wrapped, Megatron's `sharded_state_dict()` tells for every parameter its global name, the global
shape, and where this rank's part begins. Afterwards data parallelism may own any flat range of that part (ZeRO), so a
range is cut into boxes: a piece of a row, whole rows, a piece of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from models.init import parts


@dataclass(frozen=True)
class Place:
    """One block of whole rows of a parameter, and where the whole model has it."""

    key: str
    global_shape: tuple[int, ...]
    # Of the block's first element in the global tensor.
    offset: tuple[int, ...]
    # Leading axes (the layer's number) that the global tensor has and the block has not.
    prepended: int
    # Shape of the block and the place of its first element in the flat parameter.
    shape: tuple[int, ...]
    start: int
    # Whether this rank writes it; of copies on tensor-parallel ranks or tied pipeline stages the first one does.
    writes: bool

    @property
    def end(self) -> int:
        """One past the block's last element in the flat parameter."""
        return self.start + torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Box:
    """A box of a global tensor, and the flat range of this rank's own elements that fills it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    first: int
    last: int


def attach_places(chunk: torch.nn.Module) -> None:
    """Note on every parameter of a chunk, before it is wrapped, where the whole model has it (`parameter.places`)."""
    # By identity: a planned parameter has no address.
    by_storage = {p.untyped_storage()._cdata: p for p in chunk.parameters()}
    for p in by_storage.values():
        p.places = []
    for part in parts(chunk.sharded_state_dict()):
        p = by_storage[part.data.untyped_storage()._cdata]
        *copies, _ = part.replica_id  # the last one counts data-parallel copies, which the optimizer knows better
        p.places.append(
            Place(
                key=part.key,
                global_shape=tuple(part.global_shape),
                offset=tuple(part.global_offset),
                prepended=part.prepend_axis_num,
                shape=tuple(part.data.shape),
                start=part.data.storage_offset() - p.storage_offset(),
                writes=not any(copies),
            )
        )
    for name, p in chunk.named_parameters():
        covered = sum(place.end - place.start for place in p.places)
        if covered != p.numel():
            raise ValueError(f"{name} has {p.numel()} elements, of which Megatron places {covered} in the whole model.")


def boxes(place: Place, start: int, end: int) -> Iterator[Box]:
    """Cut what the flat range [start, end) of a parameter shares with `place`; `Box.first` counts from `start`."""
    low, high = max(start, place.start), min(end, place.end)
    row = place.shape[-1] if len(place.shape) > 1 else place.end - place.start
    while low < high:
        column = (low - place.start) % row
        if column or high - low < row:  # a piece of one row
            rows, columns = 1, min(row - column, high - low)
        else:
            rows, columns = (high - low) // row, row
        yield _box(place, (low - place.start) // row, column, rows, columns, low - start)
        low += rows * columns


def _box(place: Place, at_row: int, column: int, rows: int, columns: int, first: int) -> Box:
    within, shape = ((at_row, column), (rows, columns)) if len(place.shape) == 2 else ((column,), (columns,))
    ahead = place.prepended
    offset = place.offset[:ahead] + tuple(a + b for a, b in zip(place.offset[ahead:], within, strict=True))
    return Box(offset, (1,) * ahead + shape, first, first + rows * columns)
