"""From a command line to checked, frozen points, without importing torch; every refusal is a sentence."""

import os
import re
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf.schema import CommandLine, Config
from parallel import checkpoint_rules, memory, overrides, resume, rules, signals, slurm, sweep
from parallel.checkpoint_files import BadCheckpoint
from parallel.frozen import FILE, Frozen, freeze, load
from parallel.refused import Refused
from parallel.resolve import model_ranks
from tracking import result

__all__ = [
    "Refused",
    "check",
    "chosen",
    "command_line",
    "compose",
    "freeze",
    "load",
    "quote_choices",
    "remove_unless_used",
    "tell",
]

NUMBER = re.compile(r"(?<![\w.'\"+*?-])[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?(?![\w.'\"*?])")
REFUSED = 2
SWEEPS = "hydra.mode=MULTIRUN"
NOT_OF_A_POINT = {"hydra"} | {f.name for f in fields(CommandLine)} - {f.name for f in fields(Config)}
# Hydra 1.3 complains when version_base is left out, Hydra 1.4 when it is given; both mean the current behaviour here.
CURRENT = {} if [int(part) for part in hydra.__version__.split(".")[:2]] >= [1, 4] else {"version_base": None}

ConfigStore.instance().store(name="schema", node=CommandLine)


def quote_choices(argv: list[str]) -> list[str]:
    """Quote numbers that choose a group option: Hydra would read clip=0.1 as a float and refuse it."""
    quoted = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if key == "retry" and "," in value and value[0] not in "'\"":
            argument = f"{key}='{value}'"  # one list, where Hydra would see two points
        if equals and key.lstrip("+") in overrides.options():
            argument = f"{key}={NUMBER.sub(lambda number: repr(number.group()), value)}"
        quoted.append(argument)
    return quoted


def check(
    cfg: DictConfig | Config, world: int | None = None, gpus: int | None = None, trains: bool = True
) -> DictConfig | Config:
    """The resolved configuration, or Refused with every problem it has.

    A `Config` has the right keys and types already. `world` is the number of ranks where they exist already (torchrun,
    SLURM); `gpus` are those that the ranks will have where they are not those of this machine or of this SLURM
    allocation. Without `trains` the model is only to compute, which needs less memory.
    """
    if not isinstance(cfg, Config):
        cfg = _typed(cfg)
    here = world is None and gpus is None
    on_slurm = here and cfg.launch.kind == "srun"
    if gpus is None:
        gpus = slurm.gpus() if on_slurm else rules.visible_gpus()
    if cfg.parallel.dp == "auto" and here and not on_slurm:
        # Of the points that run at the same time each gets its share.
        gpus = max(gpus // max(1, cfg.launch.parallel_points), min(gpus, model_ranks(cfg.parallel)))
    found = rules.problems(cfg, gpus, world)
    _refuse(found)
    resolved = rules.resolve(cfg, gpus, world)
    # Only of a configuration that is legal otherwise can be said what it needs.
    if on_slurm:
        _refuse(slurm.problems(resolved))
    elif here:
        _refuse(memory.problems(resolved, trains))
    resolved.launch.parallel_points = 1  # how the sweep was run is no difference between its points
    return resolved


def _typed(cfg: DictConfig) -> DictConfig:
    try:
        # Overrides that add keys, and files that do, pass Hydra's own check.
        cfg = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(of_a_point(cfg), resolve=True))
        checkpoint_rules.take_shape(cfg.model)
    except OmegaConfBaseException as error:
        raise Refused([_sentence(error)]) from None
    except BadCheckpoint as problem:
        raise Refused([str(problem)]) from None
    missing = sorted(OmegaConf.missing_keys(cfg))
    _refuse([f"{key} has no value: choose an option of its group or set it." for key in missing])
    return cfg


def compose(argv: list[str]) -> tuple[DictConfig, dict[str, str], list[str], Path]:
    """Compose without Hydra's command line: configuration, choices, overrides, and the run folder Hydra would name.

    Raises Refused for words that no configuration can be composed from; the configuration is not checked yet.
    """
    argv = quote_choices(argv)
    _refuse(overrides.problems(argv, multirun=False))
    try:
        with hydra.initialize_config_dir(str(overrides.CONF), job_name="train", **CURRENT):
            full = hydra.compose("config", overrides=argv, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise Refused([_sentence(error)]) from None
    # The folder's name depends on Hydra's own values, which are read through HydraConfig.
    HydraConfig.instance().set_config(full)
    run_dir = Path(str(full.hydra.run.dir))
    choices, task = chosen(full.hydra), list(full.hydra.overrides.task)
    return of_a_point(full), choices, task, run_dir


def of_a_point(cfg: DictConfig) -> DictConfig:
    """A composed configuration without what concerns Hydra or a sweep as a whole."""
    return OmegaConf.masked_copy(cfg, [key for key in cfg if key not in NOT_OF_A_POINT])


def command_line(run: Callable[[Path, Frozen], int], argv: list[str]) -> int:
    """Compose, check and freeze every point that `argv` asks for and call `run(run_dir, frozen)` for each.

    `run` returns the exit code of its point. Returns the first code that is not 0, REFUSED when nothing was started,
    and 128 + n when signal n stopped it.
    """
    codes: list[int] = []
    refused: list[str] = []
    opened: list[Path] = []
    started: list[Path] = []

    @hydra.main(**CURRENT, config_path=str(overrides.CONF), config_name="config")
    def point(cfg: DictConfig) -> None:
        hydra_cfg = HydraConfig.get()
        run_dir = Path(hydra_cfg.runtime.output_dir)
        if sweep.current is not None:  # its launcher has checked and frozen the point
            frozen = load(run_dir)
            _say_notes(frozen.cfg)
            run(run_dir, frozen)
            return
        opened.append(run_dir)
        try:
            if (run_dir / FILE).exists() and cfg.checkpoint.resume != "auto":
                raise Refused(
                    [
                        f"{run_dir} holds a run already: name another folder with hydra.run.dir, "
                        "or go on in it with checkpoint.resume=auto."
                    ]
                )
            resolved = check(cfg)
        except Refused as refusal:
            remove_unless_used(run_dir, {".hydra"})
            refused.extend(refusal.sentences)
            return
        _say_notes(resolved)
        frozen = freeze(resolved, run_dir, chosen(hydra_cfg), list(hydra_cfg.overrides.task))
        started.append(run_dir)
        codes.append(run(run_dir, frozen))

    # Hydra's parser takes flags before overrides only.
    argv = sorted(quote_choices(argv), key=lambda word: word.startswith("~") or ("=" in word and word[0] != "-"))
    # With it Hydra raises its errors; without, it prints them with a hint at a traceback that helps nobody here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        flags = _flags(argv)
        argv = resume.command(argv, flags.multirun or SWEEPS in argv)
        flags = _flags(argv)
        own = Path(flags.config_dir) if flags.config_dir else None
        _refuse(overrides.problems(flags.overrides, flags.multirun or SWEEPS in argv, own))
        sys.argv[1:] = argv
        with signals.as_exceptions(signal.SIGTERM, signal.SIGHUP):
            point()
    except Refused as refusal:
        return tell(refusal.sentences, _headline(sweep.current is not None))
    except sweep.PointFailed as failure:
        return tell([str(failure)], "The search has stopped:") and 1
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        return tell([_sentence(error)], _headline(sweep.current is not None))
    except OSError as error:
        if started or sweep.current is not None:
            raise
        return tell([f"the run folder cannot be made: {error}; name another with hydra.run.dir or hydra.sweep.dir."])
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT, opened[-1] if opened else None)
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code > 128:
            return _stopped(stop.code - 128, opened[-1] if opened else None)
        raise
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if sweep.current is not None:
            sweep.current.end()
    if sweep.current is not None:
        return sweep.current.exit_code()
    if refused:
        return tell(refused, _headline(bool(codes)))
    return next((code for code in codes if code), 0)


def _stopped(signum: int, run_dir: Path | None) -> int:
    """Say that a signal came before any rank could say it, and leave nothing of a run that had not begun; exit code."""
    by = f"stopped by {signal.Signals(signum).name} before"
    if run_dir and result.load(run_dir):  # ranks were started
        if not (run_dir / result.FACTS_FILE).exists():
            print(f"{by} the first step ({run_dir / result.FILE})", file=sys.stderr)
    elif sweep.current is None:
        print(f"{by} anything was started", file=sys.stderr)
        if run_dir and run_dir.exists():
            remove_unless_used(run_dir, {".hydra", FILE})
    return 128 + signum


def _headline(started: bool) -> str:
    return "Not every point was started:" if started else "Nothing was started:"


def tell(sentences: list[str], headline: str = _headline(False)) -> int:
    """Print why nothing was started; the exit code that says so."""
    print(headline, *(f"  - {sentence}" for sentence in sentences), sep="\n", file=sys.stderr)
    return REFUSED


def _say_notes(cfg) -> None:
    for note in rules.notes(cfg, rules.visible_gpus()):
        print(f"note: {note}")


def _flags(argv: list[str]) -> Namespace:
    def refuse(message: str) -> NoReturn:
        raise Refused([f"{message} (train.py --hydra-help lists the flags)."])

    parser = get_args_parser()
    parser.error = refuse
    return parser.parse_args(argv)


def _refuse(sentences: list[str]) -> None:
    if sentences:
        raise Refused(sentences)


def chosen(hydra_cfg: DictConfig) -> dict[str, str]:
    """The chosen option of every group of this project."""
    options = hydra_cfg.runtime.choices
    groups = [group for group in overrides.options() if group != "sweep"]
    return {group: str(options[group]) for group in groups if options.get(group) is not None}


def _sentence(error: Exception) -> str:
    """An error of Hydra, OmegaConf or YAML on one line, with its cause and without the library's own details."""
    parts = []
    for text in (str(error), str(error.__cause__ or "")):
        lines = (line.strip() for line in text.partition("Config search path")[0].splitlines())
        line = " ".join(line for line in lines if line and not line.startswith(("reference_type=", "object_type=")))
        if line and line not in " ".join(parts):
            parts.append(line)
    return " ".join(parts)


def remove_unless_used(folder: Path, ours: set[str]) -> None:
    """Remove a folder that holds nothing but `ours`, and the folders above it that are empty then."""
    if not {path.name for path in folder.iterdir()} <= ours:
        return
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for empty in (folder, *folder.parents):
        # Folders outside the working directory may have been there, and empty, before.
        if any(empty.iterdir()) or Path.cwd() not in empty.resolve().parents:
            break
        empty.rmdir()
