"""Rules that span several configuration keys, each told in one sentence with the nearest legal choice.

Nothing here imports torch: a point is judged before the first process starts.
"""

import os
import re
from importlib.util import find_spec

from data import rules as data_rules
from parallel import checkpoint_rules, layouts, number_rules, ranges, update_rules
from parallel.devices import visible_gpus
from parallel.layouts import divisors, near
from parallel.resolve import padded_vocab, resolve, whole, world_size
from tracking import mode

__all__ = ["notes", "padded_vocab", "problems", "resolve", "visible_gpus", "world_size"]


def problems(cfg, gpus: int, world: int | None = None) -> list[str]:
    """Everything that forbids running this configuration, one sentence each; empty when it can run.

    `gpus` are the GPUs of this machine; `world` is the number of ranks where they exist already (torchrun, SLURM).
    """
    resolved = resolve(cfg, gpus, world)
    found = ranges.problems(cfg) + _length(cfg.train) + _model(cfg) + layouts.shape_problems(resolved)
    found += layouts.batch_problems(resolved) + layouts.device_problems(resolved, gpus, world)
    found += number_rules.problems(resolved) + _attention(resolved) + data_rules.problems(cfg)
    found += _tracking(cfg.tracking) + update_rules.problems(resolved)
    return found + checkpoint_rules.problems(cfg) + checkpoint_rules.weights_problems(cfg) + _rollback(cfg)


def notes(cfg, gpus: int) -> list[str]:
    """What is legal but worth a line before the run starts; `cfg` is resolved."""
    said, p, t = [], cfg.parallel, cfg.train
    ranks, cores, on_cpu = world_size(cfg), os.cpu_count() or 1, cfg.launch.device == "cpu"
    if on_cpu and ranks > cores and cfg.launch.kind == "local":
        said.append(f"{ranks} ranks share {cores} CPU cores: the numbers are right, the speed says nothing.")
    if on_cpu and cfg.precision.compute == "tf32":
        said.append("TF32 exists on NVIDIA GPUs only: on this CPU products are computed in FP32.")
    if cfg.precision.fp8 == "emulated":
        said.append("FP8 is emulated: products are computed from FP8 inputs in BF16, slower than precision=bf16.")
    if not on_cpu and ranks < gpus:
        said.append(f"{ranks} of {gpus} GPUs are used: the global batch or the command line asks for dp={p.dp}.")
    if p.zero and p.dp * p.cp == 1:
        said.append(f"parallel.zero={p.zero} shares nothing out with one data-parallel rank.")
    if t.steps is not None and cfg.schedule.warmup_steps >= t.steps:
        said.append(f"the run of {t.steps} steps ends inside the warm-up of {cfg.schedule.warmup_steps}.")
    return said + update_rules.notes(cfg)


def _length(train) -> list[str]:
    found = []
    if train.eval_sequences != "all" and whole(train.eval_sequences, 0) == 0:
        found = [f"train.eval_sequences={train.eval_sequences} is neither all nor 1 or more: take all."]
    if train.steps is None and train.tokens is None:
        found.append("train.steps and train.tokens are both null: set one of them.")
    if train.steps is not None and train.tokens is not None:
        found.append(
            f"train.steps={train.steps} and train.tokens={train.tokens} both say how long to train: "
            "add train.steps=null to go by tokens, or train.tokens=null to go by steps."
        )
    return found


def _rollback(cfg) -> list[str]:
    if cfg.train.on_nan == "rollback" and not cfg.checkpoint.every:
        return ["train.on_nan=rollback needs checkpoints: add checkpoint.every=100, or take train.on_nan=skip."]
    return []


def _model(cfg) -> list[str]:
    m, found = cfg.model, []
    heads, kv_heads, hidden = whole(m.heads), whole(m.kv_heads), whole(m.hidden)
    if hidden % heads:
        found.append(
            f"model.hidden={hidden} is not divisible by model.heads={heads}: "
            f"take {near('model.heads', heads, divisors(hidden))}."
        )
    elif m.position == "rope" and hidden // heads % 2:
        found.append(
            f"model.position=rope turns pairs of numbers and a head has {hidden // heads}: "
            f"take {near('model.heads', heads, [h for h in divisors(hidden) if hidden // h % 2 == 0])}."
        )
    if heads % kv_heads:
        found.append(
            f"model.heads={heads} is not divisible by model.kv_heads={kv_heads}: "
            f"take {near('model.kv_heads', kv_heads, divisors(heads))}."
        )
    if m.position == "learned" and whole(m.max_positions) < whole(cfg.train.seq_len):
        found.append(
            f"train.seq_len={cfg.train.seq_len} is longer than the model.max_positions={m.max_positions} learned "
            f"positions: take train.seq_len={m.max_positions} or model.max_positions={cfg.train.seq_len}."
        )
    return found


def _attention(cfg) -> list[str]:
    if cfg.model.attention != "flash_attn":
        return []
    reasons = []
    if cfg.launch.device != "cuda":
        reasons.append("a GPU")
    if find_spec("flash_attn") is None:
        reasons.append("the package flash-attn, which is not installed")
    if cfg.precision.compute not in ("bf16", "fp16", "fp8"):
        reasons.append(f"bf16 or fp16 instead of precision.compute={cfg.precision.compute}")
    return [f"model.attention=flash_attn needs {', and '.join(reasons)}: take model.attention=sdpa."] if reasons else []


def _tracking(tracking) -> list[str]:
    found = []
    if not tracking.project or re.search(r"[/\\#?%:]", tracking.project):
        found.append(f"tracking.project={tracking.project!r} is not a W&B project: leave out / \\ # ? % and :.")
    try:
        mode.decide(tracking.mode)
    except mode.TrackingError as missing:
        found.append(str(missing))
    return found
