"""Everything automatic decided: data-parallel size, device, steps. Nothing here imports torch or judges a value."""

import math
from copy import deepcopy

from conf.schema import Format, Fp8
from optim.threshold import by_model_size
from parallel.devices import FP8_FROM, capability

# Follows the name of a precision wherever it is shown, so that nobody takes the emulation for the real thing.
EMULATED = " (emulated)"
# Rules that keep nothing that would be as large as the weights.
WITHOUT_MOMENTS = ("sgd", "adafactor")


def whole(value, default: int = 1) -> int:
    """A positive whole number, or `default` where the value is not one: `parallel.rules` tells of it."""
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


def micro_batch_unit(cfg) -> int:
    """Sequences per replica that the global batch comes in: a micro-batch, or pp of them under virtual stages.

    The interleaved schedule passes micro-batches on in groups of pp and refuses an incomplete group.
    """
    group = whole(cfg.parallel.pp) if whole(cfg.parallel.vpp) > 1 else 1
    return whole(cfg.train.micro_batch) * group


def resolve(cfg, gpus: int, world: int | None = None):
    """A copy of `cfg` in which dp, the device, what computes FP8, steps, warm-up and clip threshold are decided.

    `gpus` are the GPUs of this machine; `world` is the number of ranks where they exist already (torchrun, SLURM).
    """
    cfg = deepcopy(cfg)
    if cfg.launch.device == "auto":
        cfg.launch.device = type(cfg.launch.device)("cuda" if gpus else "cpu")
    tokens_per_step = whole(cfg.train.global_batch) * whole(cfg.train.seq_len)
    if cfg.train.tokens is not None and cfg.train.steps is None:
        cfg.train.steps, cfg.train.tokens = math.ceil(cfg.train.tokens / tokens_per_step), None
    if cfg.schedule.warmup_tokens is not None:
        cfg.schedule.warmup_steps = math.ceil(cfg.schedule.warmup_tokens / tokens_per_step)
        cfg.schedule.warmup_tokens = None
    if cfg.parallel.dp == "auto":
        if world is not None:
            cfg.parallel.dp = max(1, world // model_ranks(cfg.parallel))
        elif cfg.launch.device == "cuda":
            cfg.parallel.dp = largest_dp(cfg, max(1, gpus // model_ranks(cfg.parallel)))
        else:
            cfg.parallel.dp = largest_dp(cfg, whole(cfg.parallel.dp_on_cpu))
    if cfg.clip.kind == "by_model_size" and cfg.clip.max_norm is None and whole(cfg.model.heads, 0):
        from models.flops import parameters  # which needs the padded vocabulary from here

        cfg.clip.max_norm = by_model_size(parameters(cfg.model))
    _decide_fp8(cfg.precision, cfg.launch.device)
    if cfg.optimizer.moments is None:
        cfg.optimizer.moments = cfg.precision.moments if cfg.optimizer.name not in WITHOUT_MOMENTS else Format.fp32
    return cfg


def _decide_fp8(precision, device: str) -> None:
    """Name what multiplies in FP8. GPUs that cannot be asked are taken to have it; their ranks look again."""
    if precision.fp8 == "auto":
        has = device == "cuda" and (capability() or FP8_FROM) >= FP8_FROM
        precision.fp8 = Fp8.transformer_engine if has else Fp8.emulated
    if precision.fp8 == "emulated" and not precision.name.endswith(EMULATED):
        precision.name += EMULATED


def largest_dp(cfg, most: int) -> int:
    """As many replicas, up to `most`, as the global batch can be shared out to evenly."""
    unit = micro_batch_unit(cfg)
    return next((dp for dp in range(most, 0, -1) if whole(cfg.train.global_batch) % (unit * dp) == 0), most)
