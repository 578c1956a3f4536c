"""Does this machine compute correctly? The untrained model's loss on fixed tokens against a figure that ships.

The figure depends on nothing but the model, the seed and the shape of a global batch: initial weights are a function of
those and the tokens are those of `data=mock`. So it holds under every layout and on every device, to the precision of
the format.
"""

import hashlib
import json
from dataclasses import asdict, fields

from omegaconf import MISSING

from conf.schema import Compute, Config

TOLERANCE = {Compute.fp32: 2e-6, Compute.tf32: 1e-3, Compute.bf16: 2e-3, Compute.fp16: 1e-3}
# Nothing of these changes what an untrained model computes, or it is covered by the tolerance.
_IRRELEVANT = ("name", "attention", "dropout")

# Loss in FP32 by key(cfg), for the default train.seed, train.seq_len and train.global_batch.
EXPECTED = {
    "3e7e4b12b34193ee": 5.5980949,  # model=tiny
    "aa79841d7699486b": 5.6399522,  # model=small
}


def key(cfg: Config) -> str:
    """Digest of what decides the untrained model's loss."""
    # A field that has its default changes nothing: it came later than the figures.
    neutral = {field.name: field.default for field in fields(cfg.model)}
    model = {
        name: value
        for name, value in asdict(cfg.model).items()
        if name not in _IRRELEVANT and (value != neutral[name] or neutral[name] == MISSING)
    }
    values = json.dumps([model, cfg.train.seed, cfg.train.seq_len, cfg.train.global_batch], sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:16]


def measure(cfg: Config, chunks, dp_rank: int, dp_size: int) -> float:
    """Loss of the model as it is on one global batch of fixed random tokens."""
    from data.batches import HeldOut, Mock
    from models import loss

    fixed = Mock(cfg.model.vocab, cfg.train.seq_len, stream=2)
    batches = HeldOut(fixed, cfg.train, dp_rank, dp_size, cfg.train.global_batch)
    try:
        return loss.evaluate(chunks, batches, cfg.train)
    finally:
        batches.close()


def check(cfg: Config, chunks, dp_rank: int, dp_size: int) -> str | None:
    """A sentence that says whether the figure is met, or None where none ships for this model. Every rank must call."""
    figure = EXPECTED.get(key(cfg))
    if figure is None:
        return None
    found = measure(cfg, chunks, dp_rank, dp_size)
    away, allowed = abs(found / figure - 1), TOLERANCE[cfg.precision.compute]
    if away <= allowed:
        return f"This machine computes correctly: the untrained model's loss is {found:.6f}, expected {figure:.6f}."
    return (
        f"THIS MACHINE COMPUTES SOMETHING ELSE: the untrained model's loss is {found:.6f}, expected {figure:.6f}; "
        f"off by {away:.1e} relative where {allowed:.0e} is allowed for {cfg.precision.compute.value}."
    )
