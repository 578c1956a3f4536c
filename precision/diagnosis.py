"""From what was measured about a loss or gradient that is not finite to its cause, in one line, and what to try.

The forks are those of the field note's claim 13 (gradients? then learning rate, then initialisation; else loss scale,
clipping, data). Their order and the advice follow published experience where that differs: the history of the norm and
of the loss scale comes first, a damaged weight or moment is told from a diverging run, and the same batch is computed
once more. Nothing here imports torch.
"""

import math
import statistics

# In the run's folder for it (tracking.result.DOCTOR).
BATCH, REPORT = "batch.npy", "report.json"
FP16_LARGEST = 65504.0
ROSE = 10.0  # a norm so many times its median has risen
HUGE_WEIGHT = 1e3
CLAIM = (
    "Claim 13: NaN in the gradients: lower the learning rate, then check the initialisation; none there: check the "
    "loss scale, turn on clipping, check the data."
)


def diagnose(measured: dict, cfg) -> dict:
    """The report: `cause` (one line), `advice` (overrides to paste, or None), `path` (what each fork found), `differs`.

    `measured` is what precision.nonfinite measured; `cfg` the configuration of the run.
    """
    kind, because, advice = _verdict(measured, cfg)
    first = measured["first"]
    where = f"first bad tensor: {first['tensor']} on {_ranks(first)}" if first else because
    cause = f"{measured['seen']} in step {measured['step']}, before the update; {where}"
    if first:
        cause += f" ({because})"
    return {
        "cause": cause,
        "kind": kind,
        "because": because,
        "advice": advice,
        "path": _path(measured, cfg),
        "differs": _differs(kind),
        **measured,
    }


def rose(measured: dict) -> float | None:
    """The last norms' maximum over the median of those before; None where there are too few."""
    norms = [n for n in measured["history"]["grad_norm"] if n is not None and math.isfinite(n)]
    if len(norms) < 4:
        return None
    middle = statistics.median(norms[:-1] if len(norms) < 8 else norms[:-3])
    return max(norms[-3:]) / middle if middle else math.inf


def _verdict(measured: dict, cfg) -> tuple[str, str, str | None]:
    first, step = measured["first"], measured["step"]
    tokens, rising = measured["tokens"], rose(measured)
    huge = measured["largest_weight"] and measured["largest_weight"][0] > HUGE_WEIGHT
    diverging = huge or (rising is not None and rising > ROSE)
    fp16 = cfg.precision.params == "fp16"
    if tokens["bad"]:
        return "data", f"the batch has token ids outside 0..{tokens['vocab'] - 1}", f"model.vocab={tokens['max'] + 1}"
    if first and first["direction"] == "optimizer":
        return "optimizer", "the optimizer's state was damaged, and the update spread it", _back(measured)
    if first and first["direction"] == "weights":
        if diverging:
            return "diverged", _diverging(measured, rising), _calmer(measured, cfg)
        if first.get("master_is_good"):
            return "rounding", "its master weight is finite: too large for the stored format", "precision=bf16"
        damaged = "gradients were quiet before: written from outside the update, or faulty memory"
        return "damaged", damaged, _back(measured)
    if measured["at_floor"]:
        fixed = cfg.precision.loss_scale != "dynamic"
        return "loss scale", _floor(measured, cfg), "precision.loss_scale=dynamic" if fixed else "precision=bf16"
    if not first or first["direction"] == "gone":
        device = "the same batch is finite when computed again: a passing fault of this device or of a transfer"
        return "passing", device, _back(measured)
    spread, small = measured["spread"], min(0.02, math.sqrt(0.4 / cfg.model.hidden))
    if step <= 3 and spread and spread[1][0] > 20 * small:
        return "initial weights", f"{spread[1][1]} starts at {spread[1][0]:.2g}", f"model.init_std={small:.2g}"
    if diverging:
        return "diverged", _diverging(measured, rising), _calmer(measured, cfg)
    if fp16 and (not first["nan"] or (first["largest"] or 0) > FP16_LARGEST / 64):
        return "overflow", f"larger than FP16's {FP16_LARGEST:g}", "precision=bf16"
    if (first["largest"] or 0) > 1e4:
        return "diverged", f"what goes into it is as large as {first['largest']:.2g}", _calmer(measured, cfg)
    side = "backward pass" if first["direction"] == "backward" else "forward pass"
    advice = "model.attention=math" if first["module"].endswith("core_attention") else None
    return "module", f"everything before it is finite and moderate: look at the {side} of {first['module']}", advice


def _calmer(measured: dict, cfg) -> str:
    """What calms a run, in the order of the tuning playbooks: warm-up, clipping, then the learning rate."""
    tries = []
    if cfg.schedule.warmup_steps < 10:
        tries.append(f"schedule.warmup_steps={max(10, (cfg.train.steps or 1000) // 20)}")
    if cfg.clip.kind == "none":
        tries.append("clip=1.0")
    huge = measured["largest_weight"] and measured["largest_weight"][0] > HUGE_WEIGHT
    if not tries or huge:
        # So far above anything that trains that a factor says nothing.
        tries.append(f"optimizer.lr={min(cfg.optimizer.lr / 3, 0.1 if cfg.optimizer.name == 'sgd' else 1e-3):.2g}")
    return " ".join(tries)


def _back(measured: dict) -> str | None:
    newest = measured["checkpoint"]
    return f"checkpoint.resume={newest}" if newest else "train.on_nan=rollback checkpoint.every=100"


def _diverging(measured: dict, rising: float | None) -> str:
    said = []
    if rising is not None and rising > ROSE:
        said.append(f"the gradient norm rose {rising:.3g} times before")
    if measured["largest_weight"] and measured["largest_weight"][0] > HUGE_WEIGHT:
        said.append(f"a weight is as large as {measured['largest_weight'][0]:.2g}")
    return "the run diverged: " + " and ".join(said)


def _floor(measured: dict, cfg) -> str:
    scale = measured["loss_scale"]["now"]
    kind = "its minimum" if cfg.precision.loss_scale == "dynamic" else "fixed"
    steps = measured["loss_scale"]["skipped_in_a_row"]
    return f"{steps} steps in a row overflow at loss scale {scale:g}, which is {kind}"


def _path(measured: dict, cfg) -> list[dict]:
    """Every fork with what was measured there."""
    first, scale, tokens = measured["first"], measured["loss_scale"], measured["tokens"]
    history, rising = measured["history"], rose(measured)
    norms = ", ".join(f"{n:.3g}" for n in history["grad_norm"][-6:] if n is not None) or "none yet"
    largest, spread = measured["largest_weight"], measured["spread"]
    forks = [
        ("What was seen", measured["seen"]),
        ("Gradient or not", _gradient(measured)),
        ("Same batch once more", "not finite again" if measured["reproduced"] else "finite this time"),
        ("Weights and optimizer state", _state(measured)),
    ]
    if scale["kind"] == "none":
        forks.append(("Loss scale", f"none, as {cfg.precision.compute} needs none"))
    else:
        floor = f", floor {scale['floor']:g}" if scale["kind"] == "dynamic" else ", fixed"
        forks.append(("Loss scale", f"{scale['now']:g}{floor}; {scale['skipped_in_a_row']} steps skipped in a row"))
    rise = "too few to judge" if rising is None else f"the last ones are {rising:.3g} times their median"
    rate = f"{measured['lr']:.3g} of at most {cfg.optimizer.lr:g}, warm-up {cfg.schedule.warmup_steps} steps"
    forks += [
        ("Gradient norms before", f"{norms}; {rise}"),
        ("Learning rate", rate),
        ("Clipping", "off" if cfg.clip.kind == "none" else f"{cfg.clip.kind}"),
    ]
    if spread:
        said = f"root mean square of a matrix {spread[0][0]:.2g} to {spread[1][0]:.2g}, at the start "
        said += f"{cfg.model.init_std:g} (small-init rule sqrt(0.4/hidden): {math.sqrt(0.4 / cfg.model.hidden):.2g})"
        forks.append(("Weights", said + f"; largest {largest[0]:.2g} in {largest[1]}"))
    repeated = f"; the commonest is {tokens['commonest']:.0%} of them, the longest run of one {tokens['longest_run']}"
    ids = f"{tokens['min']} to {tokens['max']} with model.vocab={tokens['vocab']}"
    forks.append(("Token ids in the batch", ids + repeated))
    if first and first.get("trail"):
        forks.append(("Largest magnitudes up to it", " → ".join(first["trail"])))
    return [{"fork": name, "measured": found} for name, found in forks]


def _gradient(measured: dict) -> str:
    first = measured["first"]
    if not first:
        return "no tensor of the pass is bad"
    side = {
        "forward": "no: it is in the forward pass already",
        "backward": "yes: the forward pass is finite",
        "weights": "no: a weight is bad before the pass begins",
        "optimizer": "no: the optimizer's state is bad before the pass begins",
        "gone": "yes, after the reduction among ranks",
    }[first["direction"]]
    return f"{side} ({first['tensor']}, {_ranks(first)})"


def _state(measured: dict) -> str:
    bad = measured["bad_state"]
    if not bad:
        return "all finite"
    shown = "; ".join(f"{b['state']} of {b['name']} on rank {b['rank']}: {b['bad']} of {b['of']}" for b in bad[:4])
    return f"not finite: {shown}" + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")


def _ranks(first: dict) -> str:
    micro_batch = first.get("micro_batch")
    return f"rank {first['rank']}" + ("" if micro_batch is None else f", micro-batch {micro_batch}")


def _differs(kind: str) -> str | None:
    """Where the advice is another than the claim's, and why."""
    why = {
        "data": "a bad token id is found by looking at the batch, not after learning rate and initialisation.",
        "optimizer": "a lower learning rate does not mend moments that are NaN; only an earlier checkpoint does.",
        "damaged": "a lower learning rate does not mend a damaged weight; only an earlier checkpoint does.",
        "rounding": "the stored format is too narrow for the weight, whatever the learning rate is.",
        "loss scale": "the gradient is not finite, and still the loss scale is what to look at.",
        "passing": "what does not come back with the same batch and weights is neither rate nor data but the machine.",
        "overflow": "a forward pass is out of FP16's range: scaling the loss acts on gradients only.",
        "diverged": "published playbooks turn to warm-up and clipping first and lower the learning rate last.",
        "module": "norms were quiet before, so learning rate and clipping are not the cause.",
    }.get(kind)
    return why and f"{CLAIM} Here: {why}"


def text(report: dict) -> str:
    """The report for a terminal."""
    width = max(len(fork["fork"]) for fork in report["path"])
    lines = [report["cause"], "", *(f"  {fork['fork']:<{width}}  {fork['measured']}" for fork in report["path"])]
    lines += ["", f"Cause: {report['because']}."]
    lines += [f"Try:   {report['advice']}"] * bool(report["advice"])
    return "\n".join(lines + [report["differs"]] * bool(report["differs"]))


def markdown(report: dict) -> str:
    """The report for people."""
    lines = [f"# {report['cause']}", "", "| fork | measured |", "|---|---|"]
    lines += [f"| {fork['fork']} | {fork['measured']} |" for fork in report["path"]]
    lines += ["", f"Cause: {report['because']}."]
    if report["advice"]:
        lines += ["", "Try:", "", f"    {report['advice']}"]
    if report["differs"]:
        lines += ["", report["differs"]]
    return "\n".join([*lines, ""])
