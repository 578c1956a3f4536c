"""Rules that span several configuration keys, each with the nearest legal choice. Nothing here imports torch."""

import math
import os
from copy import deepcopy

from omegaconf import DictConfig

from parallel.devices import visible_gpus

__all__ = ["notes", "padded_vocab", "problems", "resolve", "visible_gpus", "world_size"]


def whole(value, default: int = 1) -> int:
    """A positive whole number, or `default` where the value is not one; the ranges say what was wrong with it."""
    return value if isinstance(value, int) and value > 0 else default


def padded_vocab(model) -> int:
    """Vocabulary after padding: a multiple of `model.vocab_multiple`, the same under every layout."""
    multiple = whole(model.vocab_multiple)
    return math.ceil(whole(model.vocab) / multiple) * multiple


def model_ranks(parallel) -> int:
    """Ranks that hold one replica: tp·pp·cp."""
    return whole(parallel.tp) * whole(parallel.pp) * whole(parallel.cp)


def world_size(cfg) -> int:
    """Ranks of a resolved configuration: tp·pp·cp·dp."""
    return model_ranks(cfg.parallel) * whole(cfg.parallel.dp)


def resolve(cfg: DictConfig, gpus: int, world: int | None = None) -> DictConfig:
    """A copy with everything automatic decided: dp, device, steps for tokens and warm-up steps for warm-up tokens.

    `gpus` are the GPUs of this machine; `world` is the number of ranks where they exist already (torchrun, SLURM).
    Bad values are left as they are: `problems` tells of them.
    """
    cfg = deepcopy(cfg)
    if cfg.launch.device == "auto":
        cfg.launch.device = "cuda" if gpus else "cpu"
    tokens_per_step = whole(cfg.train.global_batch) * whole(cfg.train.seq_len)
    if cfg.train.tokens is not None and cfg.train.steps is None:
        cfg.train.steps, cfg.train.tokens = math.ceil(cfg.train.tokens / tokens_per_step), None
    if cfg.schedule.warmup_tokens is not None:
        cfg.schedule.warmup_steps = math.ceil(cfg.schedule.warmup_tokens / tokens_per_step)
        cfg.schedule.warmup_tokens = None
    if cfg.parallel.dp == "auto":
        if world is not None:
            cfg.parallel.dp = max(1, world // model_ranks(cfg.parallel))
        else:
            cfg.parallel.dp = _auto_dp(cfg, gpus if cfg.launch.device == "cuda" else 0)
    return cfg


def _auto_dp(cfg, gpus: int) -> int:
    """As many replicas as the devices hold and the global batch can be shared out to."""
    most = max(1, gpus // model_ranks(cfg.parallel)) if gpus else whole(cfg.parallel.dp_on_cpu)
    group = whole(cfg.parallel.pp) if whole(cfg.parallel.vpp) > 1 else 1
    for dp in range(most, 0, -1):
        if whole(cfg.train.global_batch) % (whole(cfg.train.micro_batch) * dp * group) == 0:
            return dp
    return most


def problems(cfg: DictConfig, gpus: int, world: int | None = None) -> list[str]:
    """Everything that forbids running this configuration, one sentence each; empty when it can run."""
    return []


def notes(cfg: DictConfig, gpus: int) -> list[str]:
    """What is legal but worth a line before the run starts; `cfg` is resolved."""
    said = []
    ranks, cores = world_size(cfg), os.cpu_count() or 1
    if cfg.launch.device == "cpu" and ranks > cores:
        said.append(f"{ranks} ranks share {cores} CPU cores: the results are right, the speed says nothing.")
    return said
