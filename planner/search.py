"""Every legal layout of a model on a cluster, ranked: dry runs of its pieces are shared, the best are planned whole.

Its pieces are one transformer layer, what the first stage has besides, and what the last stage has. They are the
same for all layouts with the same tensor-parallel size, micro-batch and recomputation, so a few dozen small dry runs
answer for thousands of layouts. What they are put together to is near the full plan, which the first places get.
"""

from copy import deepcopy
from dataclasses import dataclass, replace

from conf.schema import Recompute
from models import flops
from parallel import layouts
from parallel.layouts import divisors
from parallel.memory import BYTES, state_gib
from planner import device as devices
from planner import dry_run, links, pipeline, plan, points, step_time
from planner.profile import Part, line

MICRO_BATCHES = (1, 2, 4)
RECOMPUTE = (Recompute.none, Recompute.selective, Recompute.full)


@dataclass(frozen=True)
class Layout:
    """What is searched over."""

    tp: int
    pp: int
    vpp: int
    dp: int
    zero: int
    sequence_parallel: bool
    micro_batch: int
    recompute: Recompute

    def words(self) -> list[str]:
        """As overrides."""
        flags = {"sequence_parallel": str(self.sequence_parallel).lower(), "recompute": self.recompute.value}
        sizes = {axis: getattr(self, axis) for axis in ("tp", "pp", "vpp", "dp", "zero")}
        words = [f"parallel.{key}={value}" for key, value in {**sizes, "cp": 1, **flags, "overlap": "true"}.items()]
        return [*words, f"train.micro_batch={self.micro_batch}"]

    def of(self, cfg):
        """The configuration with this layout."""
        cfg = deepcopy(cfg)
        for axis in ("tp", "pp", "vpp", "dp", "zero", "sequence_parallel", "recompute"):
            setattr(cfg.parallel, axis, getattr(self, axis))
        cfg.parallel.cp, cfg.parallel.overlap, cfg.parallel.name = 1, True, "searched"
        cfg.train.micro_batch = self.micro_batch
        return cfg


@dataclass
class Found:
    """A layout with its predicted throughput and how much memory it leaves."""

    layout: Layout
    speed: float
    margin: int
    whole: plan.Plan | None = None


def candidates(cfg, devices_: int) -> list[Layout]:
    """Every legal layout on all devices whose model state alone fits them."""
    m, t, found = cfg.model, cfg.train, []
    memory = cfg.cluster.memory_gb * 1e9 / 2**30
    for tp in layouts.legal_tp(cfg):
        if tp > cfg.cluster.devices_per_node:
            continue
        for pp in divisors(m.layers):
            dp = devices_ // (tp * pp)
            if not dp or dp * tp * pp != devices_ or t.global_batch % dp:
                continue
            for vpp in divisors(m.layers // pp) if pp > 1 else [1]:
                for zero in (1, 3) if dp > 1 else (0,):
                    if zero == 3 and pp > 1:
                        continue  # gathering weights anew for each micro-batch is what a pipeline avoids
                    for micro in MICRO_BATCHES:
                        each = t.global_batch // dp
                        if each % micro or (vpp > 1 and each // micro % pp):
                            continue
                        for kept in RECOMPUTE:
                            sp = tp > 1 and t.seq_len % tp == 0
                            one = Layout(tp, pp, vpp, dp, zero, sp, micro, kept)
                            if state_gib(one.of(cfg), flops.parameters(m) / (tp * pp)) < memory:
                                found.append(one)
    return found


class Pieces:
    """Two dry runs without a pipeline, shared by the layouts of one tp, micro-batch, recomputation and kind of ZeRO."""

    def __init__(self, cfg, layout: Layout):
        whole = layout.zero == 3
        one = replace(layout, pp=1, vpp=1, dp=layout.dp if whole else 1, zero=3 if whole else 0)
        self.cfg, self.runs = one.of(cfg), []
        self.cfg.train.global_batch = one.micro_batch * one.dp
        for layers in (1, 2):
            self.cfg.model.layers = layers
            self.runs.append(dry_run.rank(self.cfg, 0, 1, settled=False).segments)

    def part(self, name: str, layers: int, ends: bool) -> Part:
        """A segment with `layers` layers; with `ends` also embedding, output layer and loss."""
        less, more = (run[name] for run in self.runs)
        found = line(name, less, more, layers - 2)
        if not ends:
            found.ops = {op: layers * (more.ops[op] - less.ops[op]) for op in found.ops}
        return found

    def size(self, layers: int) -> tuple[float, float, int]:
        """Parameters, bytes that one micro-batch leaves for its backward pass, and what that pass needs besides."""
        p, values = self.cfg.parallel, []
        width = BYTES[self.cfg.precision.params] / (p.dp if p.zero == 3 else 1)
        for run in self.runs:
            _, start, kinds = run["zero"].trace[0]
            kept = run["forward/0/0"].end - start
            values.append((kinds[0] / width, kept, run["backward/0/0"].peak - start - kept))
        (a, b, c), (d, e, f) = values
        return d + (layers - 2) * (d - a), e + (layers - 2) * (e - b), max(0, c, f)


def rough(cfg, layout: Layout, pieces: Pieces, device: devices.Device) -> Found:
    """Throughput and memory put together from pieces."""
    one = layout.of(cfg)
    p, m = one.parallel, one.train.global_batch // (layout.micro_batch * layout.dp)
    timer, layers = step_time.Timer(one, device), cfg.model.layers // (p.pp * p.vpp)
    passes = {
        (kind, ends): timer.passes(pieces.part(f"{kind}/0/0", layers, ends)).total
        for kind in ("forward", "backward")
        for ends in (False, True)
    }
    # The output layer is on the last stage, in its last chunk; the embedding costs next to nothing.
    last = [(stage, chunk) == (p.pp - 1, p.vpp - 1) for stage in range(p.pp) for chunk in range(p.vpp)]
    times = [
        [[passes[kind, last[stage * p.vpp + chunk]] for chunk in range(p.vpp)] for stage in range(p.pp)]
        for kind in ("forward", "backward")
    ]
    total, _ = pipeline.step_s(p.pp, p.vpp, m, *times, step_time.send_s(one, timer))

    margins, has = [], cfg.cluster.memory_gb * 1e9
    for stage in {0, p.pp - 1}:
        parameters, kept, working = pieces.size(layers * p.vpp)
        kept /= p.vpp
        waiting = min(m * p.vpp, p.pp - stage if p.vpp == 1 else 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1)
        state = state_gib(one, parameters) * 2**30
        needed = state + (waiting * kept + working) * device.fragmentation + device.context_gib * 2**30
        margins.append(int(has - needed))
    parameters = flops.parameters(cfg.model) / (p.tp * p.pp)
    group = timer.groups["dp"]
    if layout.zero == 1:
        width = 4 if one.precision.grad_reduce == "fp32" else 2
        reduce_s = links.seconds("reduce_scatter", parameters * width, group, one.cluster, device)
        gather_s = links.seconds("all_gather", parameters * 2, group, one.cluster, device)
        total += timer.exposed(reduce_s, times[1][0][0] * p.vpp, True) + timer.exposed(
            gather_s, times[0][0][0] * p.vpp, True
        )
    # Adam reads and writes weight, gradient and two moments of its share.
    total += 30 * parameters / (layout.dp if layout.zero else 1) / (cfg.cluster.memory_tb_s * 1e12 * device.memory)
    world = p.tp * p.pp * p.dp
    return Found(layout, cfg.train.global_batch * cfg.train.seq_len / total / world, min(margins))


def search(cfg, words: list[str], best: int = 3, progress=None) -> list[Found]:
    """Layouts that fit, fastest first; the first `best` are planned whole."""
    device, shared, found = devices.of(cfg.cluster), {}, []
    every = candidates(cfg, cfg.cluster.devices_per_node * cfg.cluster.nodes)
    for layout in every:
        key = (layout.tp, layout.micro_batch, layout.recompute, layout.dp if layout.zero == 3 else 0)
        if key not in shared:
            shared[key] = Pieces(cfg, layout)
            if progress:
                progress(len(shared))
        found.append(rough(cfg, layout, shared[key], device))
    found = sorted((f for f in found if f.margin > 0), key=lambda f: -f.speed)
    confirmed, rest = [], iter(found)
    for one in rest:
        one.whole = plan.of(points.config([*words, *one.layout.words()]), device)
        if one.whole.fits:
            one.speed, one.margin = one.whole.tokens_per_s_per_device, one.whole.margin
            confirmed.append(one)
        if len(confirmed) == best:
            break
    return sorted(confirmed, key=lambda f: -f.speed) + list(rest)
