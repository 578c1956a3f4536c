"""What a point needs and how fast it will be: the dry runs of its stages, its memory, its step."""

import math
from dataclasses import asdict, dataclass, field

from conf.schema import FlopRule
from models import flops
from parallel import host
from parallel.resolve import world_size
from planner import device as devices
from planner import links, profile, step_time

GIB = 2**30


@dataclass
class Stage:
    """One pipeline stage's memory on each of its devices, in bytes."""

    # Pipeline stages that are alike.
    stages: list[int]
    # Parameters held by the rank, before ZeRO shares them out.
    state: dict[str, int]
    # Most bytes alive at once, of which kinds, and in which part of the step.
    peak: int
    kinds: dict[str, int]
    at: str
    # What the device will show: the peak, what the allocator holds beyond it, and what was there before.
    needed: int


@dataclass
class Plan:
    """The answer for one point."""

    name: str
    layout: str
    devices: int
    # Device memory in bytes, and whether every stage fits.
    has: int
    fits: bool
    stages: list[Stage]
    micro_batches: int
    # Bytes that one rank sends in a step, by axis.
    bytes_per_step: dict[str, float]
    # None where nothing is known of the device's speed.
    step: step_time.StepTime | None = None
    tokens_per_step: int = 0
    tokens: int = 0
    flops_per_token: dict[str, float] = field(default_factory=dict)
    # The rule of the run and the dense peak in FLOP/s that MFU is against.
    flop_rule: str = "full"
    peak_flops: float | None = None
    price: float | None = None

    @property
    def margin(self) -> int:
        """Bytes that are left on the fullest device; negative where it does not fit."""
        return self.has - max(stage.needed for stage in self.stages)

    @property
    def tokens_per_s_per_device(self) -> float | None:
        """Throughput of one device."""
        return self.tokens_per_step / self.step.total / self.devices if self.step else None

    @property
    def hours(self) -> float | None:
        """Of the whole run."""
        return self.tokens / (self.tokens_per_s_per_device * self.devices) / 3600 if self.step else None

    def tflops(self, rule: str) -> float:
        """Model TFLOP/s of a device by a rule."""
        return self.tokens_per_s_per_device * self.flops_per_token[rule] / 1e12

    def mfu(self, rule: str) -> float:
        """Share of the dense peak that model FLOPs use."""
        return self.tflops(rule) * 1e12 / self.peak_flops

    def plain(self) -> dict:
        """As plain values for JSON."""
        found = {k: v for k, v in asdict(self).items() if k != "step"}
        found["margin_gib"] = self.margin / GIB
        if self.step:
            found["step"] = self.step.plain()
            found["tokens_per_s_per_device"] = self.tokens_per_s_per_device
            found["tflops"] = {rule: self.tflops(rule) for rule in self.flops_per_token}
            found["mfu"] = {rule: self.mfu(rule) for rule in self.flops_per_token}
            found["hours"] = self.hours
            found["device_hours"] = self.hours * self.devices
            found["cost"] = self.hours * self.devices * self.price if self.price is not None else None
        return found


def of(cfg, device: devices.Device | None = None, price: float | None = None, name: str = "") -> Plan:
    """Plan a checked configuration.

    Args:
        device: its constants; those of `cfg.cluster` where None.
        price: of one device for one hour.
    """
    return combine(cfg, profiles(cfg), device or devices.of(cfg.cluster), price, name)


def profiles(cfg, ends: bool = False, speed_only: bool = False) -> list[profile.Profile]:
    """One profile for each pipeline stage: dry runs of the first, the second and the last; the rest are as the second.

    `ends` leaves the second out, which is as the first but for the input embedding.
    """
    pp = cfg.parallel.pp
    inner = 0 if ends else min(1, pp - 1)
    found = {stage: profile.of(cfg, stage, speed_only) for stage in {0, inner, pp - 1}}
    return [found[stage] if stage in found else found[inner] for stage in range(pp)]


def combine(
    cfg, every: list[profile.Profile], device: devices.Device, price: float | None = None, name: str = ""
) -> Plan:
    """The plan that follows from the profiles of all stages."""
    m = profile.micro_batches(cfg)
    has = int((cfg.cluster.memory_gb or host.memory()[0] / 1e9 / world_size(cfg)) * 1e9)
    stages = []
    for first, one in enumerate(every):
        if not any(one is other for other in every[:first]):
            stages.append(_stage([s for s, other in enumerate(every) if other is one], one, device))
    planned = Plan(
        name=name or f"{cfg.model.name} {cfg.parallel.name}",
        layout=layout(cfg),
        devices=world_size(cfg),
        has=has,
        fits=all(stage.needed <= has for stage in stages),
        stages=stages,
        micro_batches=m,
        bytes_per_step=_sent(cfg, every[0], m),
        tokens_per_step=cfg.train.global_batch * cfg.train.seq_len,
        tokens=cfg.train.steps * cfg.train.global_batch * cfg.train.seq_len,
        flops_per_token={r.value: flops.per_token(cfg.model, cfg.train.seq_len, r) for r in FlopRule},
        flop_rule=str(cfg.train.flop_rule),
        price=price,
    )
    if cfg.cluster.memory_tb_s and cfg.cluster.peak_tflops:
        planned.step = step_time.of(cfg, device, every, m)
        planned.peak_flops = cfg.cluster.peak_tflops[cfg.precision.compute] * 1e12
    return planned


def _stage(alike: list[int], found: profile.Profile, device: devices.Device) -> Stage:
    at, part = found.peak
    state = {kind: size for kind, size in found.state.items() if kind != "other"}
    working = part.peak - sum(state.values())
    needed = sum(state.values()) + working * device.fragmentation + device.context_gib * GIB
    return Stage(alike, state, part.peak, part.kinds, at, math.ceil(needed))


def _sent(cfg, found: profile.Profile, m: int) -> dict[str, float]:
    """Bytes that the first rank sends in a step, by axis, in rings."""
    groups = links.groups(cfg.parallel, cfg.cluster.devices_per_node or 8)
    total: dict[str, float] = {}
    extra = m - found.micro_batches
    for name, part in found.parts.items():
        times = 1.0
        if name.startswith(("forward", "backward")) and part is found.typical(*_where(name)):
            times += extra
        for (axis, call), (calls, size) in part.sent.items():
            if calls:
                here = times * (m / found.micro_batches if axis == "pp" and name == "between" else 1.0)
                sent = here * links.sent_bytes(call, size, groups[axis].size)
                total[axis] = total.get(axis, 0.0) + sent
    return total


def _where(name: str) -> tuple[str, int]:
    kind, chunk, _ = name.split("/")
    return kind, int(chunk)


def layout(cfg) -> str:
    """The layout in one line."""
    p, t = cfg.parallel, cfg.train
    sizes = [f"{axis} {getattr(p, axis)}" for axis in ("tp", "pp", "vpp", "cp", "dp") if getattr(p, axis) > 1]
    extra = [f"ZeRO-{p.zero}"] * (p.zero > 0) + ["sequence parallel"] * p.sequence_parallel
    extra += ["overlap"] * p.overlap + [f"recompute {p.recompute.value}"] * (p.recompute.value != "none")
    return " · ".join([*(sizes or ["one device"]), *extra, f"micro-batch {t.micro_batch}"])
