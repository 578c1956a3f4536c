"""Compose many points in little time: Hydra composes each option once, and points are put together from the parts.

Hydra takes 65 ms a point, half a minute for 500. An option of a group is a part of its own when its file has neither a
defaults list nor a package header, because then nothing else depends on it; any other word (experiment=..., +sweep=...)
is in Hydra's hands, and a point that cannot be put together this way is composed by Hydra as a whole.
"""

import copy
from collections.abc import Sequence
from dataclasses import fields
from functools import cache

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.schema import Config
from parallel.compose import CURRENT, chosen, of_a_point
from parallel.overrides import CONF

CLASSES = {f.name: f.default_factory for f in fields(Config)}


class NotParts(Exception):
    """Something of a point that only Hydra can compose."""


def without_a_command_line() -> "Assembler":
    """An assembler of points for a program that is not started through Hydra."""
    with hydra.initialize_config_dir(str(CONF), job_name="train", **CURRENT):
        loader = GlobalHydra.instance().config_loader()
        return Assembler(loader, loader.load_configuration("config", overrides=[], run_mode=RunMode.RUN))


class Assembler:
    """Calling it with the words of a point gives its configuration, not checked yet, and its choices."""

    def __init__(self, loader, master: DictConfig):
        self._loader, self._master = loader, master
        # By the words that are no parts, a group and its option (None where no word chooses): option and part.
        self._parts: dict[tuple, tuple[str | None, object]] = {}
        self._choices: dict[tuple, dict[str, str]] = {}
        self._is_part = cache(self._is_part)
        self._value = cache(_value)

    def __call__(self, words: Sequence[str]) -> tuple[Config | DictConfig, dict[str, str]]:
        """The configuration as a Config, or as Hydra's own where it is not made of parts."""
        try:
            return self._assembled(words)
        except (NotParts, OmegaConfBaseException):
            full = self._loader.load_sweep_config(self._master, list(words))
            return of_a_point(full), chosen(full.hydra)

    def _assembled(self, words: Sequence[str]) -> tuple[Config, dict[str, str]]:
        options, values, others = {}, [], []
        for word in words:
            override = _parsed(word)
            name = override.key_or_group
            if override.type == OverrideType.CHANGE and name in CLASSES and self._is_part(name, _text(override)):
                options[name] = _text(override)
            elif override.type == OverrideType.CHANGE and name.partition(".")[0] in CLASSES and name.count(".") == 1:
                values.append(word)
            else:
                others.append(word)
        others = tuple(others)
        if not all((others, group, options.get(group)) in self._parts for group in CLASSES):
            self._compose([word for word in words if word not in values], others, options)
        found = {group: self._parts[others, group, options.get(group)] for group in CLASSES}
        cfg = Config(**{group: copy.copy(part) for group, (_, part) in found.items()})
        for word in values:
            group, name, value = self._value(word)
            setattr(getattr(cfg, group), name, value)
        return cfg, self._choices[others] | {group: option for group, (option, _) in found.items() if option}

    def _compose(self, words: list[str], others: tuple[str, ...], options: dict[str, str]) -> None:
        full = self._loader.load_sweep_config(self._master, words)
        plain = OmegaConf.to_container(of_a_point(full))
        if plain.keys() - CLASSES.keys() or "${" in str(plain):
            raise NotParts
        self._choices[others] = choices = chosen(full.hydra)
        for group, schema in CLASSES.items():
            part = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain[group]))
            self._parts[others, group, options.get(group)] = choices.get(group), part

    def _is_part(self, group: str, option: str) -> bool:
        found = self._loader.repository.load_config(f"{group}/{option}")
        return found is not None and found.header["package"] in (None, group) and not found.defaults_list


@cache
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def _text(override: Override) -> str:
    value = override.value()
    return value.text if isinstance(value, QuotedString) else str(value)


def _value(word: str) -> tuple[str, str, object]:
    """Group, name and value of a word such as optimizer.lr=1e-3, in the type that the schema gives it."""
    override = _parsed(word)
    group, _, name = override.key_or_group.partition(".")
    value = override.value()
    if isinstance(value, (dict, list)) or (isinstance(value, str) and "${" in value):
        raise NotParts
    typed = OmegaConf.structured(CLASSES[group])
    OmegaConf.update(typed, name, value)
    return group, name, typed[name]
