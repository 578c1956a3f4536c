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

from planner.operations import MESSAGES, Message, Op, classify, operation, tensors

_PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor}
# Of what is alive. The first five are model state; activations are what a forward pass leaves for its backward pass.
STATE = ("parameters", "gradients", "master weights", "moments", "buffers")
KINDS = (*STATE, "activations", "pipeline", "temporary", "optimizer", "other")


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
            cls = self._classes[func] = classify(func)
        if self.items is not None and FakeTensor not in types and cls != "lift" and any(True for _ in tensors(args)):
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
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._track(storage)
        if cls == "message":
            self._message(func, args)
        elif cls not in ("free", "lift"):
            op = operation(func, cls, args, kwargs, result)
            if op is not None:
                self.segment.ops[op] += 1
                self.segment.calls += 1
        if result is not None:
            self.segment.trace.append((func._schema.name, self.live, tuple(self.by_kind.values())))
        return result

    def _message(self, func, args) -> None:
        name = func._schema.name.removeprefix("c10d::")
        kind = MESSAGES.get(name)
        if kind is None:
            return
        kind, whole = kind
        group = next(
            ProcessGroup.unbox(a)
            for a in args
            if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
        )
        axis = self.axis_of(group)
        if axis is None:
            return
        message = Message(kind, axis, sum(t.numel() * t.itemsize for t in tensors(args[whole])))
        self.segment.messages[message] += 1
        self.segment.order.append((message, self.segment.calls))
