"""From a command line to a checked, frozen point, without importing torch."""

import os
import re
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.schema import Config
from parallel.frozen import Frozen, freeze, load
from parallel.rules import notes, problems, resolve, visible_gpus, world_size

__all__ = ["Refused", "check", "command_line", "compose", "freeze", "load", "quote_choices", "world_size"]

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = sorted(folder.name for folder in CONF.iterdir() if any(folder.glob("*.yaml")))
NUMBER = re.compile(r"(?<![\w.'\"+-])[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?(?![\w.'\"])")

ConfigStore.instance().store(name="schema", node=Config)


class Refused(Exception):
    """A command line that cannot run; `sentences` says why, one rule each."""

    def __init__(self, sentences: list[str]):
        super().__init__("\n".join(sentences))
        self.sentences = sentences


def quote_choices(argv: list[str]) -> list[str]:
    """Quote numbers that choose a group option: Hydra would read clip=0.1 as a float and refuse it."""
    quoted = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if equals and key.lstrip("+") in GROUPS:
            argument = f"{key}={NUMBER.sub(lambda number: repr(number.group()), value)}"
        quoted.append(argument)
    return quoted


def choices_of(hydra_cfg: DictConfig) -> dict[str, str]:
    """The chosen option of every group of this project."""
    return {group: str(choice) for group, choice in hydra_cfg.runtime.choices.items() if group in GROUPS and choice}


def check(cfg: DictConfig, world: int | None = None) -> DictConfig:
    """The resolved configuration, or Refused with every problem it has.

    `world` is the number of ranks where they exist already (torchrun, SLURM).
    """
    gpus = visible_gpus()
    found = problems(cfg, gpus, world)
    if found:
        raise Refused(found)
    return resolve(cfg, gpus, world)


def compose(argv: list[str]) -> tuple[DictConfig, dict[str, str], list[str], Path]:
    """Compose without Hydra's command line: configuration, choices, overrides, and the run folder Hydra would name."""
    with hydra.initialize_config_dir(str(CONF), version_base=None, job_name="train"):
        full = hydra.compose("config", overrides=quote_choices(argv), return_hydra_config=True)
    # Composition leaves the folder's name to run time; HydraConfig lets its interpolations be read.
    HydraConfig.instance().set_config(full)
    run_dir = Path(str(full.hydra.run.dir))
    choices, overrides = choices_of(full.hydra), list(full.hydra.overrides.task)
    cfg = OmegaConf.masked_copy(full, [key for key in full if key != "hydra"])
    return cfg, choices, overrides, run_dir


def command_line(run: Callable[[Path, Frozen], int], argv: list[str]) -> int:
    """Compose, check and freeze every point that `argv` asks for and call `run(run_dir, frozen)` for each.

    `run` returns the exit code of its point. Returns the first exit code that is not 0.
    """
    codes = []

    @hydra.main(version_base=None, config_path=str(CONF), config_name="config")
    def point(cfg: DictConfig) -> None:
        hydra_cfg = HydraConfig.get()
        run_dir = Path(hydra_cfg.runtime.output_dir)
        resolved = check(cfg)
        frozen = freeze(resolved, run_dir, choices_of(hydra_cfg), list(hydra_cfg.overrides.task))
        for note in notes(resolved, visible_gpus()):
            print(f"note: {note}")
        codes.append(run(run_dir, frozen))

    sys.argv[1:] = quote_choices(argv)
    point()
    return next((code for code in codes if code), 0)
