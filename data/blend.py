"""Several sets of samples as one: mixed by weight to train on, all of each to validate on."""

from collections.abc import Sequence

import numpy as np

from data.corpus import BadData
from data.order import BlendedOrder

Place = tuple[int, int]  # which set, and which sample of it


class Blend:
    """Sets of samples and the share of each; a sample is named by its set and its number there."""

    def __init__(self, sets: list[Sequence], weights: list[float]):
        self.sets, self.weights = sets, weights
        rare = min(weights) / sum(weights)
        if rare < 1 / BlendedOrder.PERIOD:
            raise BadData(f"data.path has a weight of {rare:.1e} of their sum: less than one in {BlendedOrder.PERIOD}.")

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    def __getitem__(self, place: Place) -> np.ndarray:
        chosen, number = place
        return self.sets[chosen][number]

    def order(self, seed: int) -> BlendedOrder:
        """In which order the samples are trained on."""
        return BlendedOrder([len(samples) for samples in self.sets], self.weights, seed)


class Joined(Sequence):
    """All samples of several sets once, evenly mixed, so that the first ones of them are a fair part too."""

    def __init__(self, sets: list[Sequence]):
        self.sets = sets
        counts = [len(samples) for samples in sets]
        place = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count] or [[]])
        mixed = np.argsort(place, kind="stable")
        self.set = np.repeat(np.arange(len(sets)), counts)[mixed]
        self.number = np.concatenate([np.arange(count) for count in counts])[mixed]

    def __len__(self) -> int:
        return len(self.set)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.sets[self.set[index]][int(self.number[index])]
