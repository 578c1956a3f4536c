"""The resolved configuration in a run folder: written once before the ranks start, read by each of them.

Ranks read this file and never compose, so every rank sees the same values whatever the command line, the clock or a
shared file system does meanwhile. Importing this module does not import Hydra or torch.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf.schema import Config
from parallel.rules import world_size
from tracking import whole

FILE = "resolved.yaml"
GROUPS = tuple(f.name for f in fields(Config))
# These decide where a run computes, who hears of it and what is kept of it, not what it computes.
NOT_HASHED = ("probe", "checkpoint", "tracking", "cluster", "launch")


class BadFrozen(ValueError):
    """A run folder whose `resolved.yaml` is missing or is not one that `freeze` wrote."""


@dataclass
class Frozen:
    """One point as its ranks see it."""

    cfg: Config
    choices: dict[str, str]
    overrides: list[str]
    world_size: int
    config_hash: str


def config_hash(cfg: DictConfig | Config) -> str:
    """SHA-256 of every value that decides what is computed; NOT_HASHED is left out."""
    values = {group: value for group, value in _plain(cfg).items() if group not in NOT_HASHED}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def freeze(cfg: DictConfig | Config, run_dir: str | Path, choices: dict[str, str], overrides: list[str]) -> Frozen:
    """Write `resolved.yaml` into `run_dir` and return what `load` will read there.

    `cfg` is a checked and resolved configuration (`parallel.rules.resolve`).
    """
    # What is shown of the run everywhere; of FP8 it tells whether it is emulated.
    shown = {group: cfg.precision.name if group == "precision" and cfg.precision.fp8 == "emulated" else choice
             for group, choice in choices.items()}  # fmt: skip
    content = _plain(cfg) | {
        "choices": shown,
        "overrides": list(overrides),
        "world_size": world_size(cfg),
        "config_hash": config_hash(cfg),
    }
    path = Path(run_dir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.write(path, OmegaConf.to_yaml(OmegaConf.create(content)).encode())
    return load(run_dir)


def load(run_dir: str | Path) -> Frozen:
    """Read a run folder's `resolved.yaml`; raises BadFrozen with one sentence if it cannot be."""
    path = Path(run_dir) / FILE
    try:
        content = OmegaConf.load(path)
        cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), {g: content[g] for g in GROUPS}))
        rest = OmegaConf.to_container(OmegaConf.masked_copy(content, [k for k in content if k not in GROUPS]))
        return Frozen(cfg=cfg, **rest)
    except FileNotFoundError:
        raise BadFrozen(f"{path} does not exist; the folder is not that of a run") from None
    except (YAMLError, OmegaConfBaseException, KeyError, TypeError, ValueError, OSError) as error:
        raise BadFrozen(f"{path} is not a frozen configuration: {str(error).splitlines()[0]}") from error


def as_written(run_dir: str | Path) -> DictConfig | None:
    """What `resolved.yaml` says, maybe in the words of another version of this project; None without one."""
    path = Path(run_dir) / FILE
    if not path.exists():
        return None
    try:
        return OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, OSError) as error:
        raise BadFrozen(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _plain(cfg: DictConfig | Config) -> dict:
    if isinstance(cfg, Config):
        return asdict(cfg, dict_factory=_by_name)
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True, enum_to_str=True)


def _by_name(items: list[tuple]) -> dict:
    return {name: value.name if isinstance(value, Enum) else value for name, value in items}
