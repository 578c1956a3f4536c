"""A plan in words and tables."""

import sys

from planner.plan import GIB, Plan
from tracking.console import duration

# What to change when a kind dominates, in the order in which to try.
REMEDIES = {
    "activations": "parallel.recompute=full or a smaller train.micro_batch",
    "temporary": "a smaller train.micro_batch or more parallel.tp",
    "moments": "parallel.offload=optimizer, parallel.zero=1 with more data-parallel devices, or more parallel.tp or pp",
    "master weights": "parallel.zero=1 with more data-parallel devices, or more parallel.tp or pp",
    "gradients": "parallel.zero=2, or more parallel.tp or pp",
    "parameters": "parallel.zero=3, or more parallel.tp or pp",
}
RULES = {"full": "6N + 12·layers·hidden·seq", "causal": "6N + 6·layers·hidden·seq"}


def text(plan: Plan) -> str:
    """Everything about one plan."""
    rows = [f"{plan.name}: {plan.layout} on {plan.devices} device{'s' * (plan.devices > 1)}", *memory(plan)]
    if plan.step is None:
        return "\n".join([*rows, "Speed: nothing is known of this device; choose cluster=..., see conf/cluster/."])
    return "\n".join([*rows, *speed(plan), *traffic(plan)])


def memory(plan: Plan) -> list[str]:
    """Does it fit, by how much, and what takes most."""
    fullest = max(plan.stages, key=lambda stage: stage.needed)
    most = max(fullest.kinds, key=fullest.kinds.get)
    verdict = (
        f"Fits, {plan.margin / GIB:.1f} GiB to spare" if plan.fits else f"DOES NOT FIT by {-plan.margin / GIB:.1f} GiB"
    )
    share = fullest.kinds[most] / fullest.peak
    rows = [f"{verdict} of {plan.has / GIB:.1f} GiB; most is {most} ({share:.0%} of the peak)."]
    if not plan.fits:
        rows.append(f"  Try {REMEDIES.get(most, REMEDIES['activations'])}.")
    kinds = [kind for kind in fullest.kinds if any(stage.kinds.get(kind, 0) > GIB / 1000 for stage in plan.stages)]
    rows.append("  GiB at the peak   " + "".join(f"{kind:>16}" for kind in [*kinds, "peak", "needed"]))
    for stage in plan.stages:
        values = [stage.kinds.get(kind, 0) for kind in kinds] + [stage.peak, stage.needed]
        name = f"stage {_ranges(stage.stages)}" if len(plan.stages) > 1 or stage.stages != [0] else "each device"
        rows.append(f"  {name:18}" + "".join(f"{value / GIB:16.2f}" for value in values) + f"   in {stage.at}")
    return rows


def speed(plan: Plan) -> list[str]:
    """Step time and its parts, throughput, the whole run."""
    step, total = plan.step, plan.step.total
    parts = [("compute", step.compute), *((f"waiting for {axis}", s) for axis, s in step.exposed.items())]
    parts += [("bubble", step.bubble), ("optimizer", step.optimizer), ("offload", step.offload)]
    listed = ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in parts if seconds > 0.0005 * total)
    hidden = "".join(f"; hidden behind computation: {axis} {s:.3g} s" for axis, s in step.hidden.items())
    rules = ", ".join(
        f"{plan.tflops(rule):.0f} TFLOP/s and {plan.mfu(rule):.1%} MFU by rule {rule} ({RULES[rule]})"
        for rule in sorted(plan.flops_per_token, key=lambda rule: rule != plan.flop_rule)
    )
    hours = plan.hours
    cost = (
        f", {hours * plan.devices * plan.price:,.0f} at {plan.price:g} a device-hour" if plan.price is not None else ""
    )
    return [
        f"A step takes {total:.3g} s ({plan.micro_batches} micro-batches): {listed}{hidden}.",
        f"  {plan.tokens_per_s_per_device:,.0f} tokens/s a device; {rules}; dense peak {plan.peak_flops / 1e12:,.0f}.",
        f"  {plan.tokens:,} tokens take {duration(hours * 3600)}, {hours * plan.devices:,.1f} device-hours{cost}.",
    ]


def traffic(plan: Plan) -> list[str]:
    """Bytes that the first rank sends in a step."""
    sent = ", ".join(f"{axis} {size / 1e9:.3g} GB" for axis, size in plan.bytes_per_step.items() if size > 1e6)
    return [f"  One device sends in a step: {sent}."] if sent else []


def table(plans: list[Plan]) -> str:
    """One line a plan, fastest first, those that do not fit last."""
    ordered = sorted(plans, key=lambda p: (not p.fits, -(p.tokens_per_s_per_device or 0)))
    rows = [f"{'tokens/s/device':>16}{'MFU':>8}{'GiB to spare':>14}  point"]
    for plan in ordered:
        fast = plan.step and plan.fits
        rows.append(
            (f"{plan.tokens_per_s_per_device:16,.0f}{plan.mfu(plan.flop_rule):8.1%}" if fast else f"{'-':>16}{'-':>8}")
            + f"{plan.margin / GIB:14.1f}  {plan.name}: {plan.layout}"
        )
    return "\n".join(rows)


def ranking(cfg, found: list, most: int = 12) -> str:
    """The best layouts of a search; those in front were planned whole, the others put together from pieces."""
    if not found:
        return (
            f"No layout of {cfg.model.name} fits cluster={cfg.cluster.name}: take more cluster.nodes or larger devices."
        )
    rows = [f"{'tokens/s/device':>16}{'GiB to spare':>14}  layout ({len(found)} fit)"]
    for one in found[:most]:
        words = " ".join(word.removeprefix("parallel.") for word in one.layout.words())
        rows.append(
            f"{one.speed:16,.0f}{one.margin / GIB:14.1f}  {words}{'' if one.whole else '   (not planned whole)'}"
        )
    return "\n".join(rows)


def progress(done: int) -> None:
    """One line on a terminal that counts dry runs."""
    if sys.stderr.isatty():
        print(f"\r{done} dry runs", end="", file=sys.stderr, flush=True)


def _ranges(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
