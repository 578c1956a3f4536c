"""What is wrong with the words of a command line, all at once: unknown groups, options and keys, wrong types.

Hydra stops at the first mistake, accepts `+unknown.key=...` and merges a group given as a list; this module is asked
first and knows the schema, so it can name the nearest right word.
"""

import types
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.schema import CommandLine, Config

CONF = Path(__file__).resolve().parent.parent / "conf"
# The other groups (experiment) have no values of their own: they set those of these.
VALUE_GROUPS = tuple(f.name for f in fields(Config))
WORDS = {
    "parallel.dp": "a whole number or auto",
    "precision.loss_scale": "none, dynamic or a number",
    "train.eval_sequences": "a whole number or all",
}
# How to get what no option of a group has.
OTHERWISE = {
    "clip": "; any other threshold is clip.max_norm=NUMBER",
    "parallel": "; any other layout is parallel.tp=N parallel.pp=N parallel.zero=N and so on",
}
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@cache
def options(own: Path | None = None) -> dict[str, list[str]]:
    """Every group and its options, with those of the user's `own` folder (--config-dir)."""
    found: dict[str, list[str]] = {}
    for root in (CONF, own) if own else (CONF,):
        for file in sorted(root.glob("*/*.yaml")):
            found.setdefault(file.parent.name, []).append(file.stem)
    return found


@cache
def default_groups() -> list[str]:
    """The groups that every point chooses from, `experiment` included."""
    defaults = OmegaConf.load(CONF / "config.yaml").defaults
    return [group for entry in defaults if OmegaConf.is_dict(entry) for group in entry]


@cache
def keys() -> list[str]:
    """Every dotted key of the schema."""
    found = []
    for name, hint in get_type_hints(CommandLine).items():
        found += [f"{name}.{f.name}" for f in fields(hint)] if is_dataclass(hint) else [name]
    return found


def problems(words: list[str], multirun: bool, own: Path | None = None) -> list[str]:
    """One sentence for each mistake in these overrides; empty when Hydra can compose them.

    `own` is the folder of a user's own options (--config-dir).
    """
    found, parser = [], OverridesParser.create()
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException:
            found.append(f"'{word}' cannot be read: write group=option or key=value, and quote special characters.")
            continue
        found += _problems(override, word, multirun, options(own))
    return found or ([] if multirun else _sweep_problems(words))


def _sweep_problems(words: list[str]) -> list[str]:
    """A file of conf/sweep without -m, unless its keys are given: then it is one of its points, run on its own."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in words)
    file = CONF / "sweep" / f"{given.get('sweep')}.yaml"
    if not file.exists():
        return []
    sweeper = OmegaConf.load(file).hydra.sweeper
    swept = {word.partition("=")[0] for pair in sweeper.get("pairs", ()) for word in pair.split()}
    swept |= set(sweeper.get("params", ()))
    if swept <= given.keys():
        return []
    return [f"+sweep={file.stem} asks for several points: add -m to run them as a sweep."]


def _problems(override: Override, word: str, multirun: bool, groups: dict[str, list[str]]) -> list[str]:
    name = override.key_or_group
    if name == "hydra" or name.startswith(("hydra.", "hydra/")):
        return []
    if override.is_sweep_override() and not multirun:
        return [f"{word} asks for several points: add -m to run them as a sweep."]
    if override.type == OverrideType.DEL:
        return [f"{word} removes something that every run needs: choose another option or value instead."]
    values = _values(override)
    if name in groups:
        return [sentence for value in values for sentence in _group_problems(name, groups[name], value, override)]
    hint = key_type(name)
    if hint is None:
        # By the last part, too: lr for optimizer.lr.
        known = {key.rpartition(".")[2]: key for key in reversed(keys())} | {key: key for key in (*keys(), *groups)}
        near = get_close_matches(name, known, n=1) or get_close_matches(name.split(".")[-1], known, n=1, cutoff=0.5)
        advice = f"did you mean {known[near[0]]}?" if near else "python train.py --cfg job shows every key."
        return [f"{name} is neither a group nor a key: {advice}"]
    free = _in_dict(name)
    if override.type == OverrideType.ADD and not free:
        return [f"{word} adds a key that exists: write it without the plus sign."]
    if override.type == OverrideType.CHANGE and free:
        return [f"{word} names a new entry of {name.rpartition('.')[0]}: write +{word}."]
    return [sentence for value in values for sentence in _type_problems(name, hint, value)]


def _values(override: Override) -> list[Any]:
    """The values an override asks for: several for a sweep, none for a pattern over options."""
    if not override.is_sweep_override():
        return [override.value()]
    if isinstance(override._value, Glob) or not override.is_discrete_sweep():
        return []
    return [v.text if isinstance(v, QuotedString) else v for v in override.sweep_iterator()]


def _group_problems(group: str, known: list[str], value: Any, override: Override) -> list[str]:
    if isinstance(value, (list, dict)):
        return [f"{group} takes one option, not {value}: choose one of {join(known)}, or sweep with -m {group}=A,B."]
    if override.type != OverrideType.CHANGE and group in default_groups():
        return [f"{override.input_line} adds a group that is there already: write it without the plus sign."]
    if override.type == OverrideType.CHANGE and group not in default_groups() and value in known:
        return [f"{group} has no option unless it is added: write +{override.input_line}."]
    if value in known or (value is None and group not in VALUE_GROUPS):
        return []
    value = "null" if value is None else str(value)
    near = get_close_matches(value, known, n=1)
    advice = f", did you mean {near[0]}" if near else ""
    return [f"{group}={value} is not an option{advice}: there are {join(known)}{OTHERWISE.get(group, '')}."]


def key_type(name: str) -> Any:
    """The schema's type of a dotted key, None if it has none by that name."""
    hint: Any = CommandLine
    for part in name.split("."):
        if is_dataclass(hint):
            hint = get_type_hints(hint).get(part)
        else:
            hint = get_args(hint)[1] if get_origin(hint) is dict else None
    return hint


def _in_dict(name: str) -> bool:
    return get_origin(key_type(name.rpartition(".")[0])) is dict


def _type_problems(name: str, hint: Any, value: Any) -> list[str]:
    if isinstance(value, str) and "${" in value:
        return []
    try:
        OmegaConf.update(OmegaConf.structured(CommandLine), name, value, force_add=True)
        return []
    except OmegaConfBaseException:
        whole = int in (hint, *get_args(hint)) and isinstance(value, float) and value.is_integer()
        advice = f" (write {int(value)})" if whole else ""
        value = "null" if value is None else value
        return [f"{name}={value} has the wrong type: it takes {WORDS.get(name) or describe(hint)}{advice}."]


def describe(hint: Any) -> str:
    """A type of the schema in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(part) for part in get_args(hint))
    if hint is type(None):
        return "null"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return join([member.name for member in hint])
    return TYPES.get(hint, "a mapping of keys to values")


def join(words: list[str]) -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
