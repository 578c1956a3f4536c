"""What one call at PyTorch's dispatcher is: a kernel with its operations and bytes, a message, or nothing to count."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import flop_registry

# Written, but what was there before is not read.
_OVERWRITES = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_"}
# No kernel runs, or one whose time nobody notices.
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "detach_", "alias", "view",
    "_unsafe_view", "_reshape_alias", "resize_", "set_", "is_pinned", "_local_scalar_dense", "_to_copy_",
    "scalar_tensor", "rand_like",
}  # fmt: skip


@dataclass(frozen=True)
class Op:
    """One kind of kernel call: a matrix product, attention, or something that only moves bytes."""

    # aten name.
    name: str
    # Format of its largest input: float32, bfloat16, ...
    dtype: str
    # (m, n, k, batch) of a matrix product; (batch, heads, queries, keys, head_dim) of attention; () otherwise.
    shape: tuple[int, ...]
    # Multiplications and additions; attention counts the whole score matrix.
    flops: int
    # Read and written.
    bytes: int


@dataclass(frozen=True)
class Message:
    """One collective, or a send or receive, as this rank calls it."""

    # all_reduce, all_gather, reduce_scatter, broadcast, send, recv, ...
    name: str
    # tp, pp, cp, dp, ... : which group.
    axis: str
    # Of the whole tensor: what an all-reduce reduces, an all-gather results in, a reduce-scatter starts from.
    bytes: int


# Name, and which argument is the whole tensor.
MESSAGES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}


def tensors(value) -> Iterator[torch.Tensor]:
    """All tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


def classify(func) -> str:
    """message, item (a number is read), view, lift, free (no kernel), product, attention, overwrites or moves."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "c10d":
        return "message"
    if namespace == "prim":
        return "view"
    if name == "lift_fresh":
        return "lift"
    if name == "_local_scalar_dense":
        return "item"
    if name in _FREE:
        return "free"
    returns = func._schema.returns
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return "view"
    if func._overloadpacket in flop_registry or "scaled_dot_product" in name or "flash_attention" in name:
        return "attention" if "attention" in name else "product"
    return "overwrites" if name in _OVERWRITES else "moves"


def operation(func, cls: str, args, kwargs, result) -> Op | None:
    name = func._schema.name.partition("::")[2]
    inputs = list(tensors(args)) + list(tensors(list((kwargs or {}).values())))
    outputs = list(tensors(result))
    if cls == "overwrites":
        inputs = inputs[1:]
    if name == "embedding":
        inputs = inputs[1:] + outputs
    moved = sum(t.numel() * t.itemsize for t in inputs) + sum(t.numel() * t.itemsize for t in outputs)
    if not moved:
        return None
    largest = max(inputs or outputs, key=lambda t: t.numel())
    dtype, shape, flops = str(largest.dtype).removeprefix("torch."), (), 0
    if cls == "product":
        shape = _product(name, inputs)
        flops = 2 * shape[0] * shape[1] * shape[2] * shape[3]
    elif cls == "attention":
        q, k = (inputs[1], inputs[2]) if "backward" in name else (inputs[0], inputs[1])
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3])
        # Two products forwards; five backwards, the scores being computed again.
        flops = (10 if "backward" in name else 4) * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3]
    return Op(name, dtype, shape, flops, moved)


def _product(name: str, inputs) -> tuple[int, int, int, int]:
    a, b = inputs[-2:]
    if name in ("bmm", "baddbmm"):
        return a.shape[1], b.shape[2], a.shape[2], a.shape[0]
    return a.shape[0], b.shape[1], a.shape[1], 1
