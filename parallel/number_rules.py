"""Rules of the group `precision`: which formats fit together, what FP8 needs, and what a probe may ask for."""

import math
from importlib.util import find_spec

from parallel.layouts import multiples, near
from parallel.resolve import whole

STORED_AS = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
# Rules that look at whole tensors.
WHOLE = ("lamb", "adafactor", "muon")
FP8_UNIT = 16  # both sides of an FP8 product are multiples of it on a tensor core


def problems(cfg) -> list[str]:
    """What forbids these number formats, one sentence each; `cfg` is resolved."""
    n = cfg.precision
    return _formats(n) + _without_masters(cfg) + _loss_scale(n) + _fp8(cfg)


def _formats(n) -> list[str]:
    found, stored = [], STORED_AS[n.compute]
    if n.params != stored:
        found.append(
            f"precision.params={n.params} does not fit precision.compute={n.compute}: take precision.params={stored}."
        )
    if n.activations != n.params:
        found.append(
            f"precision.activations={n.activations}: pipeline stages send each other what they have computed, in the "
            f"format of the weights: take precision.activations={n.params}."
        )
    if n.grad_reduce not in ("fp32", n.params):
        found.append(
            f"precision.grad_reduce={n.grad_reduce} is neither fp32 nor the format of the weights: "
            f"take precision.grad_reduce=fp32{'' if n.params == 'fp32' else f' or {n.params}'}."
        )
    if n.gradients != n.grad_reduce:
        found.append(
            f"precision.gradients={n.gradients}: gradients are summed in the buffer that is reduced: "
            f"take precision.gradients={n.grad_reduce} or precision.grad_reduce={n.gradients}."
        )
    if n.moments not in ("fp32", "bf16"):
        found.append(f"precision.moments={n.moments}: moments are kept in fp32 or bf16.")
    return found


def _without_masters(cfg) -> list[str]:
    n = cfg.precision
    if n.main_params == "fp32":
        return []
    if not n.main_params == n.compute == n.params == "bf16":
        return [
            f"precision.main_params={n.main_params} with precision.compute={n.compute}: only BF16 weights can do "
            "without master weights: take precision.main_params=fp32, or precision=bf16_pure."
        ]
    if cfg.optimizer.name in WHOLE:
        return [
            f"optimizer={cfg.optimizer.name} looks at whole tensors and needs FP32 master weights: "
            "take precision=bf16, or a rule such as optimizer=adamw or optimizer=lion."
        ]
    if n.grad_reduce != "bf16":
        return [
            f"precision.grad_reduce={n.grad_reduce}: without master weights a gradient has the format of its weight: "
            "take precision.grad_reduce=bf16 precision.gradients=bf16, or precision.main_params=fp32."
        ]
    return []


def _loss_scale(n) -> list[str]:
    found, scale, number = [], n.loss_scale, isinstance(n.loss_scale, (int, float))
    if not number and scale not in ("none", "dynamic"):
        found.append(f"precision.loss_scale={scale} is not a loss scale: take none, dynamic or a number above 0.")
    elif number and not 0 < scale < math.inf:
        found.append(f"precision.loss_scale={scale} is out of range: take none, dynamic or a number above 0.")
    elif n.compute == "fp16" and scale == "none":
        found.append(
            "precision.compute=fp16 loses small gradients without a loss scale: take precision.loss_scale=dynamic, "
            "or precision.loss_scale=1 to train unscaled on purpose."
        )
    elif n.compute != "fp16" and scale != "none":
        found.append(f"precision.loss_scale={scale} is for fp16, not for {n.compute}: take precision.loss_scale=none.")
    if n.min_loss_scale > n.initial_loss_scale:
        found.append(
            f"precision.min_loss_scale={n.min_loss_scale} is above the first scale: "
            f"take precision.initial_loss_scale={n.min_loss_scale} or more."
        )
    return found


def _fp8(cfg) -> list[str]:
    n, found = cfg.precision, []
    kept = whole(n.bf16_first_layers, 0) + whole(n.bf16_last_layers, 0)
    if (n.fp8 == "none") == (n.compute == "fp8"):
        return [f"precision.fp8={n.fp8} does not fit precision.compute={n.compute}: take precision=fp8."]
    if n.fp8 == "none":
        if kept:
            found.append(f"precision.bf16_first_layers and bf16_last_layers are for fp8, not for {n.compute}: take 0.")
        return found
    if kept >= whole(cfg.model.layers):
        found.append(
            f"precision.bf16_first_layers={n.bf16_first_layers} and bf16_last_layers={n.bf16_last_layers} leave none "
            f"of model.layers={cfg.model.layers} in FP8: take fewer, or precision=bf16."
        )
    return found + (_emulated(n) if n.fp8 == "emulated" else _transformer_engine(cfg, kept))


def _emulated(n) -> list[str]:
    if n.fp8_recipe == "current":
        return []
    return [
        f"precision.fp8_recipe={n.fp8_recipe} needs Transformer Engine on a Hopper GPU or newer, and FP8 is emulated "
        "here with the current scale of each tensor: take precision.fp8_recipe=current."
    ]


def _transformer_engine(cfg, kept: int) -> list[str]:
    n, p, m, found = cfg.precision, cfg.parallel, cfg.model, []
    if cfg.launch.device != "cuda":
        found.append("precision.fp8=transformer_engine needs a GPU: take precision.fp8=emulated.")
    elif find_spec("transformer_engine") is None:
        found.append(
            "precision=fp8 on this GPU needs the package transformer-engine, which is not installed: "
            "pip install 'transformer-engine[pytorch]', or take precision.fp8=emulated (slow), or precision=bf16."
        )
    if kept and n.fp8_recipe == "delayed":
        found.append(
            "precision.fp8_recipe=delayed scales all layers together, so none can stay in BF16: take "
            "precision.fp8_recipe=current, or precision.bf16_first_layers=0 precision.bf16_last_layers=0."
        )
    most = whole(m.layers) // whole(p.pp)
    for name in ("bf16_first_layers", "bf16_last_layers"):
        if getattr(n, name) > most:
            found.append(f"precision.{name}={getattr(n, name)} is more than a pipeline stage has: take {most} or less.")
    split = whole(p.cp) * (whole(p.tp) if p.sequence_parallel else 1)
    sizes = {
        "model.hidden": whole(m.hidden) // whole(p.tp),
        "model.ffn_hidden": whole(m.ffn_hidden) // whole(p.tp),
        "train.seq_len": whole(cfg.train.seq_len) * whole(cfg.train.micro_batch) // split,
    }
    for key, size in sizes.items():
        if size % FP8_UNIT:
            group, name = key.split(".")
            value = whole(getattr(getattr(cfg, group), name))
            found.append(
                f"{key}={value} leaves a rank {size}, and FP8 products need multiples of {FP8_UNIT}: "
                f"take {near(key, value, multiples(value, FP8_UNIT * whole(p.tp) * split))}."
            )
    return found
