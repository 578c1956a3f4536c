"""What the runs of each claim's experiment found, and what that says about the claim; nothing here trains.

A reader takes the runs of a sweep, all of which ended in order, and returns the figure found and the verdict. Verdicts
follow from the figures: the same reader says the opposite when the runs do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median, stdev

from tracking.runs import Run, value_of

HOLDS, FAILS, PARTLY = "holds here", "does not hold here", "holds in part here"


@dataclass(frozen=True)
class Claim:
    """A claim about training large models, and what is known about it from elsewhere."""

    # Name of its option in conf/experiment.
    experiment: str
    # The claim, one sentence.
    claim: str
    # The figure that was given with it.
    given: str
    # What has been published for or against it.
    published: str
    # From its runs: the figure found, the verdict.
    read: Callable[[list[Run]], tuple[str, str]]


def loss(run: Run) -> float:
    """Final validation loss; infinite for a run that went NaN."""
    found = run.value("val_loss_final")
    return math.inf if run.status == "nan" or found is None or math.isnan(found) else found


def of(runs: list[Run], **wanted: str) -> Run:
    """The one run whose choices or keys are these; the first `_` stands for the dot of a key: `optimizer_lr`."""
    keys = {name.replace("_", ".", 1): value for name, value in wanted.items()}
    return next(run for run in runs if all(value_of(run, key) == value for key, value in keys.items()))


def probed(run: Run, metric: str) -> float:
    """Mean of a probed metric over the probed steps; NaN for a run that ended before the first of them."""
    values = [line[metric] for line in run.metrics() if metric in line]
    return fmean(values) if values else math.nan


def values(runs: list[Run], key: str) -> list[str]:
    """The values that a key or group has among the runs, in their order."""
    return list(dict.fromkeys(value_of(run, key) for run in runs))


def zero3(runs: list[Run]) -> tuple[str, str]:
    """Extra time of ZeRO-3 over data parallel, with and without accumulation."""
    extra = {}
    for micro in ("1", "4"):
        here = [of(runs, parallel=name, train_micro_batch=micro) for name in ("dp2", "zero3")]
        plain, sharded = (run.value("tokens_per_s") for run in here)
        extra[micro] = plain / sharded - 1
    verdict = HOLDS if extra["4"] > 0.2 and extra["1"] < extra["4"] else FAILS
    if extra["1"] > extra["4"]:
        verdict += ": accumulation makes it worse, since the weights are gathered in every micro-batch"
    return f"{extra['4']:+.0%} time with 1 micro-batch a step, {extra['1']:+.0%} with 4", verdict


def loss_scaling(runs: list[Run]) -> tuple[str, str]:
    """Underflow with and without loss scaling, and the loss."""
    lost = {name: probed(of(runs, precision=name), "amp/underflow_fraction") for name in ("fp16", "fp16_unscaled")}
    end = {name: loss(of(runs, precision=name)) for name in ("fp32", "fp16", "fp16_unscaled")}
    saved = lost["fp16"] < 0.5 * lost["fp16_unscaled"]
    costs = end["fp16_unscaled"] / end["fp32"] - 1 > 0.01
    words = {
        (True, True): HOLDS,
        (True, False): f"{PARTLY}: scaling saves the gradients, but a model this size trains without them",
        (False, True): f"{PARTLY}: training suffers, but not from gradients that scaling saves",
        (False, False): FAILS,
    }
    found = f"{lost['fp16_unscaled']:.1%} of the gradient lost unscaled, {lost['fp16']:.2%} scaled; "
    return found + ", ".join(f"{name} {value:.3f}" for name, value in end.items()), words[saved, costs]


def depth(runs: list[Run]) -> tuple[str, str]:
    """Difference of the final loss to FP32 at each depth."""
    layers = values(runs, "model.layers")
    off = {
        name: [loss(of(runs, precision=name, model_layers=n)) / loss(of(runs, precision="fp32", model_layers=n)) - 1
               for n in layers]
        for name in ("fp16", "bf16")
    }  # fmt: skip
    grows = off["fp16"][-1] > 0.01 and off["fp16"][-1] > 2 * abs(off["fp16"][0])
    words = [f"{name} {', '.join(f'{value:+.2%}' for value in found)}" for name, found in off.items()]
    return f"loss against FP32 at {', '.join(layers)} layers: {'; '.join(words)}", HOLDS if grows else FAILS


def lost_updates(runs: list[Run]) -> tuple[str, str]:
    """Share of updates lost at each learning rate, with and without master weights."""
    rates = values(runs, "optimizer.lr")
    lost = {
        name: [probed(of(runs, precision=name, optimizer_lr=lr), "amp/lost_updates") for lr in rates]
        for name in ("bf16_pure", "bf16")
    }
    falls = lost["bf16_pure"][0] > lost["bf16_pure"][-1] + 0.1
    verdict = FAILS
    if falls:
        verdict = f"{PARTLY}: updates are lost, but by their size relative to the weight, far above 2^-24"
    words = [f"{name} {', '.join(f'{value:.0%}' for value in found)}" for name, found in lost.items()]
    return f"updates lost at lr {', '.join(rates)}: {'; '.join(words)}", verdict


def bf16(runs: list[Run]) -> tuple[str, str]:
    """Underflow and loss of BF16 with and without FP32 states, beside FP32 and FP16."""
    lost = {name: probed(of(runs, precision=name), "amp/underflow_fraction") for name in ("bf16", "fp16_unscaled")}
    end = {name: loss(of(runs, precision=name)) for name in ("fp32", "bf16", "bf16_pure")}
    ends, best = lost["bf16"] < 0.1 * lost["fp16_unscaled"], end["bf16"] < end["bf16_pure"]
    close = abs(end["bf16"] / end["fp32"] - 1) < 0.01
    verdict = HOLDS if ends and best and close else PARTLY if ends or best else FAILS
    found = f"underflow {lost['bf16']:.2%} (unscaled FP16 {lost['fp16_unscaled']:.2%}); loss "
    return found + ", ".join(f"{name} {value:.3f}" for name, value in end.items()), verdict


def tf32(runs: list[Run]) -> tuple[str, str]:
    """Speed of TF32 over FP32; only NVIDIA GPUs have TF32."""
    plain, fast = (of(runs, precision=name) for name in ("fp32", "tf32"))
    if plain.keys.get("launch.device") == "cpu":
        return "no TF32 on this CPU: products are computed in FP32", "cannot be answered here: run it on a GPU"
    ratio = fast.value("tokens_per_s") / plain.value("tokens_per_s")
    return f"{ratio:.2f} times the tokens/s", HOLDS if ratio > 1.05 else FAILS


def optimizers(runs: list[Run]) -> tuple[str, str]:
    """Best loss of each optimizer over its learning rates."""
    best = {name: min(loss(run) for run in runs if value_of(run, "optimizer") == name)
            for name in values(runs, "optimizer")}  # fmt: skip
    order = sorted(best, key=best.get)
    behind = best["sgd"] > best["adamw"] * 1.05
    verdict = f"{HOLDS} as far as SGD is behind; best is {order[0]}" if behind else FAILS
    return ", ".join(f"{name} {best[name]:.3f}" for name in order), verdict


def clipping(runs: list[Run]) -> tuple[str, str]:
    """Best threshold for each width and rule, and what a small one costs."""
    widths, limits, words, best = values(runs, "model.hidden"), values(runs, "clip"), [], []
    cost = {}
    for rule in ("adamw", "momentum"):
        for width in widths:
            end = {name: loss(of(runs, clip=name, optimizer=rule, model_hidden=width)) for name in limits}
            best.append(min(end, key=end.get))
            cost.setdefault(rule, []).append(end["0.001"] / end["1.0"] - 1)
            words.append(f"{rule} at width {width} best with {best[-1]}")
    slow = {rule: fmean(found) for rule, found in cost.items()}
    words.append("0.001 instead of 1.0: " + ", ".join(f"{rule} {share:+.1%} loss" for rule, share in slow.items()))
    moves = best[0] != best[1] and "none" not in best[:2] and float(best[0]) > float(best[1])
    slows = [rule for rule, share in slow.items() if share > 0.02]
    verdict = PARTLY if moves or slows else FAILS
    if slows:
        verdict += f": too small is slow under {' and '.join(slows)}" + (
            "" if "adamw" in slows else ", not under AdamW"
        )
    return "; ".join(words), verdict


def memory(runs: list[Run]) -> tuple[str, str]:
    """Growth of the peak memory over the last two thirds of a run, the larger of the runs."""
    grown = []
    for run in runs:
        peaks = [line["mem/peak_gib"] for line in run.metrics() if "mem/peak_gib" in line]
        grown.append(peaks[-1] / peaks[len(peaks) // 3] - 1)
    verdict = HOLDS if max(grown) > 0.05 else f"{FAILS}: memory that is freed each step does not pile up"
    return f"peak grows by {max(grown):.1%} over the last two thirds of {int(runs[0].value('steps'))} steps", verdict


def bf16_or_fp16(runs: list[Run]) -> tuple[str, str]:
    """Mean loss of both formats over seeds, against the spread of seeds, and the steps FP16 skipped."""
    end = {name: [loss(run) for run in runs if value_of(run, "precision") == name] for name in ("bf16", "fp16")}
    skipped = median(run.value("skipped_steps") for run in runs if value_of(run, "precision") == "fp16")
    ahead, chance = fmean(end["fp16"]) - fmean(end["bf16"]), max(map(stdev, end.values()))
    found = f"BF16 {fmean(end['bf16']):.4f}, FP16 {fmean(end['fp16']):.4f} (seeds differ by {chance:.4f}); "
    verdict = HOLDS if ahead > 2 * chance else f"{FAILS}: no difference beyond chance"
    if ahead < -2 * chance:
        verdict = f"{FAILS}: FP16 does better"
    return found + f"FP16 skips {skipped:.0f} steps", verdict


def adamw(runs: list[Run]) -> tuple[str, str]:
    """The best of learning rate and threshold, and where 5e-5 with 0.1 stands."""
    best = min(runs, key=loss)
    theirs = min(
        (run for run in runs if value_of(run, "clip") == "0.1"), key=lambda run: float(run.keys["optimizer.lr"])
    )
    rate, limit = float(best.keys["optimizer.lr"]), value_of(best, "clip")
    found = f"best lr {rate:g} with clip {limit}: {loss(best):.3f}; "
    found += f"{float(theirs.keys['optimizer.lr']):g} with 0.1: {loss(theirs):.3f}"
    return found, HOLDS if best is theirs else f"{FAILS}; for a model of this size from scratch, not for 13B"


CLAIMS = [
    Claim("claim_03_zero3", "ZeRO-3 communicates more; gradient accumulation makes up for it", "+40 %",
          "volume +50 % (ZeRO paper, section 7); with accumulation the ratio grows", zero3),
    Claim("claim_04_loss_scaling", "FP16 without loss scaling loses small gradients; scaling saves them", "–",
          "5 % of gradients below 2^-24 in a speech model; many nets need no scale (1710.03740)", loss_scaling),
    Claim("claim_05_depth", "FP16 rounding error builds up layer by layer", "3 % lost at 100 layers",
          "nothing found for it; FP16 models of 70 to 96 layers match their peers", depth),
    Claim("claim_06_lost_updates", "An update below the format's smallest step has no effect", "2^-24",
          "lost when below half a unit of the weight: 2^-12 of it in FP16, 2^-9 in BF16 (1710.03740)", lost_updates),
    Claim("claim_07_bf16", "BF16 ends underflow; best with FP32 optimizer states", "8 bits of exponent, 7 of mantissa",
          "supported; BF16 weights alone are not enough (Gopher)", bf16),
    Claim("claim_08_tf32", "TF32 speeds up FP32 matrix products", "–", "up to 8 times on an A100 (data sheet)", tf32),
    Claim("claim_09_optimizers", "From SGD to AdamW, optimizers differ", "–",
          "SGD clearly behind; adaptive ones within 1.4 times of each other when tuned", optimizers),
    Claim("claim_10_clip", "The larger the model the smaller the clip threshold; too small learns slowly",
          "1B 1.0, 10B 0.1, 100B 0.01", "contradicted: 1.0 from 14M to 671B; Gopher 0.25, OPT 0.3", clipping),
    Claim("claim_16_memory", "Out of memory after 100 steps: activations or gradients pile up", "100 steps",
          "a graph kept alive, fragmentation or longer batches", memory),
    Claim("claim_18_bf16_or_fp16", "BF16 before FP16 for Llama-2 13B", "–",
          "supported for pretraining at scale, by range rather than by loss", bf16_or_fp16),
    Claim("claim_20_adamw", "AdamW with clip 0.1 and learning rate 5e-5 does best", "0.1, 5e-5",
          "contradicted for pretraining: clip 1.0 and 3e-4 for Llama-2 13B", adamw),
]  # fmt: skip
