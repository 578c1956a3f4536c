"""From what each stage does to how long a step takes: kernels, messages, overlap, pipeline, optimizer."""

from dataclasses import asdict, dataclass, field

from planner import kernel_time, links, pipeline
from planner.device import Device
from planner.profile import Part, Profile

# Axes whose messages are waited for where they are called.
WAITED = ("tp", "cp")


@dataclass
class Passes:
    """Seconds of one micro-batch's pass through one chunk."""

    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    # What overlap does not hide of ZeRO-2/3's gathering and reducing.
    dp: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from begin to end."""
        return self.compute + self.tp + self.cp + self.dp


@dataclass
class StepTime:
    """Seconds of one step, cut into parts that add up to `total`; of the pipeline rank with most to do."""

    compute: float = 0.0
    # Waiting for messages, by axis: tp, cp, dp, pp.
    exposed: dict[str, float] = field(default_factory=dict)
    bubble: float = 0.0
    optimizer: float = 0.0
    # Fetching what is kept in host memory, and taking it back.
    offload: float = 0.0
    # Messages that overlap hides, by axis.
    hidden: dict[str, float] = field(default_factory=dict)
    events: list[pipeline.Event] = field(default_factory=list, repr=False)

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + sum(self.exposed.values()) + self.bubble + self.optimizer + self.offload

    def plain(self) -> dict:
        """As plain values, without the events."""
        values = asdict(self)
        values.pop("events")
        return values | {"total": self.total}


class Timer:
    """Times parts of a step on one cluster."""

    def __init__(self, cfg, device: Device):
        self.cfg, self.cluster, self.device = cfg, cfg.cluster, device
        self.groups = links.groups(cfg.parallel, cfg.cluster.devices_per_node)

    def kernels(self, part: Part) -> float:
        """Seconds of its kernels one after another, or of the host that launches them."""
        kernels = kernel_time.total(part.ops.items(), self.cluster, self.device, self.cfg.precision.compute)
        return max(kernels, part.calls * self.device.dispatch_s)

    def messages(self, part: Part, axis: str) -> float:
        """Seconds of its messages over one axis one after another."""
        group, total = self.groups[axis], 0.0
        for (over, name), (calls, size) in part.sent.items():
            if over == axis and calls:
                total += calls * links.seconds(name, size / calls, group, self.cluster, self.device)
        return total

    def exposed(self, communication: float, computation: float, overlap: bool) -> float:
        """What remains of communication beside computation that may hide it."""
        if not overlap:
            return communication
        hidden = min(communication, computation)
        return communication - hidden + hidden * self.device.overlap_loss

    def passes(self, part: Part) -> Passes:
        """A forward or backward pass; data-parallel messages in it are ZeRO-2/3's, once a micro-batch."""
        p = self.cfg.parallel
        compute = self.kernels(part)
        dp = self.exposed(self.messages(part, "dp"), compute, p.overlap) if p.zero >= 2 else 0.0
        return Passes(compute, self.messages(part, "tp"), self.messages(part, "cp"), dp)


def of(cfg, device: Device, profiles: list[Profile], m: int) -> StepTime:
    """Time a step of `m` micro-batches; `profiles` holds one profile for every pipeline stage."""
    p, timer = cfg.parallel, Timer(cfg, device)
    chunks = range(p.vpp)
    cache: dict[int, tuple] = {}
    for profile in profiles:
        if id(profile) not in cache:
            cache[id(profile)] = tuple(
                [timer.passes(profile.typical(kind, chunk)) for chunk in chunks] for kind in ("forward", "backward")
            )
    forward = [[one.total for one in cache[id(profile)][0]] for profile in profiles]
    backward = [[one.total for one in cache[id(profile)][1]] for profile in profiles]
    busiest = max(range(p.pp), key=lambda stage: sum(forward[stage]) + sum(backward[stage]))
    both = [one for kind in cache[id(profiles[busiest])] for one in kind]
    send = send_s(cfg, timer)
    total, events = pipeline.step_s(p.pp, p.vpp, m, forward, backward, send)
    ideal = total if not send else pipeline.step_s(p.pp, p.vpp, m, forward, backward, 0.0)[0]
    busy = m * sum(one.total for one in both)

    step = StepTime(compute=m * sum(one.compute for one in both), bubble=max(0.0, ideal - busy), events=events)
    step.exposed = {axis: m * sum(getattr(one, axis) for one in both) for axis in ("tp", "cp", "dp")}
    step.exposed["pp"] = total - ideal
    profile = profiles[busiest]
    _reduce(cfg, timer, profile, step, sum(backward[busiest]), sum(forward[busiest]))
    own = profile.parts["optimizer"]
    step.optimizer = timer.kernels(own) + timer.kernels(profile.parts["zero"]) + timer.messages(own, "all")
    step.offload = 2 * profile.in_host / (device.host_gb_s * 1e9)
    step.exposed = {axis: seconds for axis, seconds in step.exposed.items() if seconds}
    return step


def send_s(cfg, timer: Timer) -> float:
    """Passing one micro-batch's hidden states to the next stage."""
    p, t = cfg.parallel, cfg.train
    if p.pp == 1:
        return 0.0
    split = p.cp * (p.tp if p.sequence_parallel else 1)
    width = 4 if cfg.precision.params == "fp32" else 2
    size = t.seq_len * t.micro_batch * cfg.model.hidden * width / split
    return links.seconds("send", size, timer.groups["pp"], timer.cluster, timer.device)


def _reduce(cfg, timer: Timer, profile: Profile, step: StepTime, backward: float, forward: float) -> None:
    """Once a step: gradients are reduced and, under ZeRO-1, weights gathered; tied embeddings add their gradients."""
    p = cfg.parallel
    if p.zero <= 1:
        parts = [part for name, part in profile.parts.items() if name != "optimizer"]
        gather = [part for name, part in profile.parts.items() if name.startswith("forward")]
        reduce_s = sum(timer.messages(part, "dp") for part in parts) - sum(
            timer.messages(part, "dp") for part in gather
        )
        gather_s = sum(timer.messages(part, "dp") for part in gather) + timer.messages(profile.parts["optimizer"], "dp")
        left = timer.exposed(reduce_s, backward, p.overlap) + timer.exposed(gather_s, forward, p.overlap)
        step.exposed["dp"] = step.exposed.get("dp", 0.0) + left
        if reduce_s + gather_s > left:
            step.hidden["dp"] = reduce_s + gather_s - left
    else:
        step.exposed["dp"] += sum(timer.messages(profile.parts[name], "dp") for name in ("between", "optimizer"))
    embedding = sum(timer.messages(part, "embedding") for part in profile.parts.values())
    if embedding:
        step.exposed["embedding"] = embedding
