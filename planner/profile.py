"""What one rank does in a step of any length and depth, from dry runs of a few layers and micro-batches.

Layers repeat and so do micro-batches, so what a step allocates, computes and sends is a straight line in both. Two dry
runs of different depth give the line of every program point; the peak is the largest of them at the depth asked for.
A model that is shallow anyway is run as it is.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, field, replace

from models import flops
from planner import dry_run, fake_world
from planner.operations import Op
from planner.recorder import KINDS, Segment

# Layers of a chunk in the shorter of the two dry runs; the longer one has one more. With a CPU's kernels, whose first
# layer keeps a copy that the others do not, it takes one more to see a layer in the middle.
SHORT = {"cuda": 1, "cpu": 2}
# Megatron-FSDP lets this many elements of gradients wait to be reduced, and only then does one layer go like another.
QUEUE = 1_000_000_000


@dataclass
class Part:
    """One segment of a step at full depth: counts may be fractions of a call where sizes grow with the depth."""

    ops: dict[Op, float] = field(default_factory=dict)
    # Calls and bytes by axis and collective.
    sent: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    peak: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Floating-point operations of products and attention."""
        return sum(op.flops * count for op, count in self.ops.items())

    @property
    def calls(self) -> float:
        """Kernels."""
        return sum(self.ops.values())


@dataclass
class Profile:
    """One rank's step: its parts by name, and the micro-batches that were run for it."""

    rank: int
    stage: int
    parts: dict[str, Part]
    micro_batches: int
    # Bytes of model state by kind, on the device.
    state: dict[str, int]
    # Bytes of model state in host memory.
    in_host: int = 0

    def to_host(self, kind: str) -> None:
        """Bytes of `kind` are in host memory, where a dry run, which has one memory, does not put them."""
        self.in_host = self.state.pop(kind, 0)
        for part in self.parts.values():
            part.peak -= self.in_host
            part.kinds.pop(kind, None)

    @property
    def peak(self) -> tuple[str, Part]:
        """The part of the step with most bytes alive."""
        return max(self.parts.items(), key=lambda item: item[1].peak)

    def typical(self, kind: str, chunk: int) -> Part:
        """The forward or backward pass of a chunk for a micro-batch that is neither the first nor the last."""
        numbers = [int(name.rsplit("/", 1)[1]) for name in self.parts if name.startswith(f"{kind}/{chunk}/")]
        return self.parts[f"{kind}/{chunk}/{1 if len(numbers) > 2 else 0}"]


def enough_micro_batches(cfg, stage: int) -> int:
    """Micro-batches after which a step of the schedule has shown everything it does, of those that a rank has."""
    p, has = cfg.parallel, micro_batches(cfg)
    return min(has, 2 * p.pp if p.vpp > 1 else p.pp - stage + 1)


def micro_batches(cfg) -> int:
    """Micro-batches of one rank in a step."""
    return cfg.train.global_batch // (cfg.train.micro_batch * cfg.parallel.dp)


def of(cfg, stage: int, speed_only: bool = False) -> Profile:
    """Profile the first rank of pipeline stage `stage`.

    `speed_only` runs as little as tells kernels and messages, several times faster; what it says of memory is no use.
    """
    p = cfg.parallel
    number, count = fake_world.coordinates(cfg, stage), enough_micro_batches(cfg, stage)
    deep = cfg.model.layers // (p.pp * p.vpp)
    short = 1 if speed_only else shallow(cfg)
    if speed_only:
        count = p.pp if p.vpp > 1 else 1
    if deep <= short + 1:
        segments = dry_run.rank(cfg, number, count, not speed_only).segments
        parts = {name: _whole(segment) for name, segment in segments.items()}
        kept = state(segments)
    else:
        less, more = (
            dry_run.rank(_with_layers(cfg, n), number, count, not speed_only).segments for n in (short, short + 1)
        )
        beyond = deep - short - 1
        parts = {name: line(name, less[name], more[name], beyond) for name in more}
        low, high = state(less), state(more)
        kept = {kind: round(_at(low[kind], high[kind], beyond)) for kind in high}
        # The update goes over what the rank owns, in pieces whose sizes depend on the depth: all of it counts.
        share = sum(kept.values()) / sum(high.values())
        for name in ("zero", "optimizer"):
            parts[name].ops = {op: count * share for op, count in more[name].ops.items()}
    parts.pop("end", None)
    # The token ids of a step's micro-batches are on the device from its beginning.
    tokens = (micro_batches(cfg) - count) * cfg.train.micro_batch * (cfg.train.seq_len + 1) * 8
    for part in parts.values():
        part.peak += tokens
    found = Profile(number, stage, parts, count, kept)
    if cfg.parallel.offload == "optimizer" and cfg.launch.device == "cuda":
        found.to_host("moments")
    return found


def _with_layers(cfg, per_chunk: int):
    short = deepcopy(cfg)
    short.model.layers = per_chunk * cfg.parallel.pp * cfg.parallel.vpp
    return short


def shallow(cfg) -> int:
    """Layers of a chunk from which on each further one changes a step in the same way."""
    short = SHORT[cfg.launch.device]
    if cfg.parallel.zero < 3:
        return short
    layer = flops.parameters(replace(cfg.model, layers=1)) - flops.parameters(replace(cfg.model, layers=0))
    return short + 2 + math.ceil(QUEUE / (layer / cfg.parallel.tp))


def _at(short: float, long: float, beyond: int) -> float:
    return long + beyond * (long - short)


def state(segments: dict[str, Segment]) -> dict[str, int]:
    """Bytes by kind when a step begins."""
    kinds = segments["zero"].trace[0][2]
    return {kind: size for kind, size in zip(KINDS, kinds, strict=True) if kind not in ("temporary",) and size}


def _sent(segment: Segment) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for message, count in segment.messages.items():
        calls, size = found.get((message.axis, message.name), (0, 0))
        found[message.axis, message.name] = calls + count, size + count * message.bytes
    return found


def _whole(segment: Segment) -> Part:
    return Part(dict(segment.ops), _sent(segment), segment.peak, segment.kinds)


def line(name: str, short: Segment, long: Segment, beyond: int) -> Part:
    """A segment with `beyond` layers more than `long` has, on the line through both."""
    ops = {op: _at(short.ops[op], long.ops[op], beyond) for op in short.ops.keys() | long.ops.keys()}
    low, high = _sent(short), _sent(long)
    zero = (0, 0)
    sent = {
        key: tuple(_at(a, b, beyond) for a, b in zip(low.get(key, zero), high.get(key, zero), strict=True))
        for key in low.keys() | high.keys()
    }
    peak, kinds = _peak(short, long, beyond)
    if not name.startswith(("forward", "backward")):
        # What is done parameter by parameter has no common program points, and its largest parameter at any depth.
        peak = max(peak, round(_at(short.peak, long.peak, beyond)))
    return Part({op: count for op, count in ops.items() if count}, sent, peak, kinds)


def _peak(short: Segment, long: Segment, beyond: int) -> tuple[int, dict[str, int]]:
    """The largest of the lines through the points that both depths share, counted from the start and from the end."""
    points = []
    for a, b in ((short.trace, long.trace), (short.trace[::-1], long.trace[::-1])):
        for one, other in zip(a, b, strict=False):
            if one[0] != other[0]:
                break
            points.append((_at(one[1], other[1], beyond), one[2], other[2]))
    if not points:
        return round(_at(short.peak, long.peak, beyond)), {k: v for k, v in long.kinds.items() if v}
    most, low, high = max(points, key=lambda point: point[0])
    return round(most), {kind: round(_at(a, b, beyond)) for kind, a, b in zip(KINDS, low, high, strict=True) if a or b}
