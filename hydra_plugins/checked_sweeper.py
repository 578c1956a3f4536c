"""Hydra's basic sweeper, with lists of pairs for what is no product, and words that are checked wherever they stand."""

from dataclasses import dataclass, field

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override

from parallel import overrides
from parallel.compose import quote_choices
from parallel.refused import Refused
from parallel.resume import key


@dataclass
class CheckedSweeperConf:
    """Entry of the group `hydra/sweeper`; the points of a sweep kept in a file (conf/sweep/)."""

    _target_: str = "hydra_plugins.checked_sweeper.CheckedSweeper"
    max_batch_size: int | None = None
    # The sweep is the product of these: group or key to its values, separated by commas.
    params: dict[str, str] = field(default_factory=dict)
    # Each is several words that belong together; what is typed and `params` are combined with each of them.
    pairs: list[str] = field(default_factory=list)


ConfigStore.instance().store(group="hydra/sweeper", name="checked", node=CheckedSweeperConf, provider="tripod")


class CheckedSweeper(BasicSweeper):
    """The product of `params` and of the command line's words, which win, times `pairs`."""

    def __init__(self, max_batch_size: int | None, params: dict[str, str], pairs: list[str]):
        super().__init__(max_batch_size, params)
        self._pairs = [quote_choices(words.split()) for words in pairs]

    def _parse_config(self) -> list[str]:
        words = quote_choices(super()._parse_config())
        found = overrides.problems(words, multirun=True)
        for pair in self._pairs:
            found += overrides.problems(pair, multirun=False)
        if found:
            raise Refused([f"hydra.sweeper: {sentence}" for sentence in found])
        return words

    def split_arguments(self, parsed: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        """The words of every point, in batches."""
        (points,) = super().split_arguments(parsed, None)
        points = [quote_choices(words) for words in points]  # glob(*) finds options that look like numbers
        if self._pairs:
            typed = {override.key_or_group for override in parsed}
            pairs = [[word for word in pair if key(word) not in typed] for pair in self._pairs]
            points = [point + pair for pair in pairs for point in points]
        return list(self.split_overrides_to_chunks(points, max_batch_size))

    def validate_batch_is_legal(self, batch: list[list[str]]) -> None:
        """Nothing: the launcher composes and checks every point, and says which of them has which problem."""
