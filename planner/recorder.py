"""What a program allocates, computes and sends, seen operation by operation at PyTorch's dispatcher.

Works under fake tensors, where nothing is computed, and in a real run alike, so one can be judged by the other.
"""

import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

_PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor}
# Of what is alive. The first five are model state; activations are what a forward pass leaves for its backward pass.
STATE = ("parameters", "gradients", "master weights", "moments", "buffers")
KINDS = (*STATE, "activations", "pipeline", "temporary", "optimizer", "other")
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


@dataclass
class Segment:
    """What happened in one part of a step."""

    ops: Counter[Op] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)
    # In the order of the calls: (message, operations before it in this segment).
    order: list[tuple[Message, int]] = field(default_factory=list)
    calls: int = 0
    # Most bytes alive at once, and of which kind they were.
    peak: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    # Bytes alive at the end.
    end: int = 0
    # After every allocating call: its name, bytes alive, and how many of each of KINDS.
    trace: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """While it is active every storage is followed from its first use to its end.

    `axis_of` names the axis of a process group; `items` is what reading a number off a tensor gives (None: the number).
    """

    def __init__(self, axis_of=None, items=None):
        super().__init__()
        self.axis_of = axis_of or (lambda group: "?")
        self.items = items
        self.live = 0
        self.by_kind = dict.fromkeys(KINDS, 0)
        self.segments: dict[str, Segment] = {}
        self._alive: dict[int, list] = {}  # storage → [bytes, kind, weak reference]
        self._named: set[str] = set()
        self._classes: dict = {}
        self.enter("build", "other")

    # -- segments ------------------------------------------------------------------------------------------------------

    def enter(self, name: str, kind: str) -> None:
        """From here on operations belong to segment `name`, and what is allocated is of `kind`."""
        if self.segments:
            self.segment.end = self.live
        self.kind = kind
        self.segment = self.segments.setdefault(name, Segment())
        self.name = name
        self._peak()

    def relabel(self, tensors, kind: str) -> None:
        """Say what kind the storages of `tensors` are that nothing has been said of."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            entry = self._alive.get(storage._cdata) or self._track(storage)
            if entry[1] in self._named:
                continue
            self.by_kind[entry[1]] -= entry[0]
            self.by_kind[kind] += entry[0]
            entry[1] = kind
            self._named.add(kind)

    # -- storages ------------------------------------------------------------------------------------------------------

    def _track(self, storage):
        key, size = storage._cdata, storage.nbytes()
        entry = [size, self.kind, None]
        entry[2] = weakref.ref(storage, lambda _, key=key, entry=entry: self._end(key, entry))
        self._alive[key] = entry
        self._add(entry[1], size)
        return entry

    def _end(self, key: int, entry: list) -> None:
        if self._alive.get(key) is entry:
            del self._alive[key]
        self._add(entry[1], -entry[0])
        entry[0] = 0

    def _add(self, kind: str, size: int) -> None:
        self.live += size
        self.by_kind[kind] += size
        if size > 0 and self.live > self.segment.peak:
            self._peak()

    def _peak(self) -> None:
        self.segment.peak = max(self.segment.peak, self.live)
        if self.segment.peak == self.live:
            self.segment.kinds = dict(self.by_kind)

    def __enter__(self):
        # A storage that is resized passes by the dispatcher (Megatron-FSDP frees gathered weights this way).
        self._resize = resize = torch.UntypedStorage.resize_

        def followed(storage, size):
            result = resize(storage, size)
            entry = self._alive.get(storage._cdata)
            if entry is not None:
                change, entry[0] = storage.nbytes() - entry[0], storage.nbytes()
                self._add(entry[1], change)
                self.segment.trace.append(("resize", self.live, tuple(self.by_kind.values())))
            return result

        torch.UntypedStorage.resize_ = followed
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    # -- operations ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor: what it does with its local tensors comes by here again
        cls = self._classes.get(func)
        if cls is None:
            cls = self._classes[func] = _class(func)
        if self.items is not None and FakeTensor not in types and cls != "lift" and any(True for _ in _tensors(args)):
            # Real tensors among fake ones, such as a device mesh, have values, and they decide control flow.
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        if cls == "view":
            return func(*args, **(kwargs or {}))
        if cls == "item" and self.items is not None:
            return self.items(args[0])
        if cls == "message" and self.items is not None and "coalesced" in func._schema.name:
            result = FakeWork().boxed()  # fake tensors do not know these calls, which return only something to wait for
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._track(storage)
        if cls == "message":
            self._message(func, args)
        elif cls not in ("free", "lift"):
            op = _op(func, cls, args, kwargs, result)
            if op is not None:
                self.segment.ops[op] += 1
                self.segment.calls += 1
        if result is not None:
            self.segment.trace.append((func._schema.name, self.live, tuple(self.by_kind.values())))
        return result

    def _message(self, func, args) -> None:
        name = func._schema.name.removeprefix("c10d::")
        kind = _MESSAGES.get(name)
        if kind is None:
            return
        kind, whole = kind
        group = next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        axis = self.axis_of(group)
        if axis is None:
            return
        message = Message(kind, axis, sum(t.numel() * t.itemsize for t in _tensors(args[whole])))
        self.segment.messages[message] += 1
        self.segment.order.append((message, self.segment.calls))


# Name, and which argument is the whole tensor.
_MESSAGES = {
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


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _class(func) -> str:
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


def _op(func, cls: str, args, kwargs, result) -> Op | None:
    name = func._schema.name.partition("::")[2]
    inputs = list(_tensors(args)) + list(_tensors(list((kwargs or {}).values())))
    outputs = list(_tensors(result))
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
