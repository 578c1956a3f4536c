"""In which order samples are seen: a pure function of the seed and the global sample index.

Nothing else enters: not the micro-batch, the data-parallel size, the number of steps, or how often a run was resumed.
So two layouts that are compared have trained on the same samples in the same order.
"""

import numpy as np


class Order:
    """Goes through `count` samples again and again, each epoch in a new random order.

    Without a seed every epoch goes from first to last. The permutation is made from Philox's raw stream, which NumPy
    keeps stable between versions (its `permutation` may change).
    """

    def __init__(self, count: int, seed: int | None):
        self.count, self.seed = count, seed
        self._epoch, self._permutation = -1, None

    def __getitem__(self, index: int) -> int:
        """Which sample, in [0, count), stands at global position `index` >= 0."""
        epoch, position = divmod(index, self.count)
        if self.seed is None:
            return position
        if epoch != self._epoch:
            random = np.random.Philox(key=[self.seed % 2**64, epoch]).random_raw(self.count)
            self._epoch, self._permutation = epoch, np.argsort(random, kind="stable")
        return int(self._permutation[position])


class BlendedOrder:
    """Goes through several sets of samples at once, taking from each its share, each in its own `Order`.

    Which set a position takes from repeats after PERIOD positions and follows Megatron's rule: the set that is most
    behind its share. Megatron's BlendedDataset applies it to as many samples as a run asks for; a period needs no such
    number, and any position is found at once. A set that is used up before the others starts its next epoch.
    """

    PERIOD = 2**20

    def __init__(self, counts: list[int], weights: list[float], seed: int):
        """`counts` samples of each set and their `weights`, of any sum; each must be at least one in PERIOD."""
        from megatron.core.datasets.helpers_cpp import build_blending_indices

        self.orders = [Order(count, seed) for count in counts]
        shares = np.array(weights, np.float64) / sum(weights)
        self.set, self.before = np.zeros(self.PERIOD, np.int16), np.zeros(self.PERIOD, np.int64)
        build_blending_indices(self.set, self.before, shares, len(counts), self.PERIOD, False)
        self.in_period = np.bincount(self.set, minlength=len(counts))

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Which set, and which sample of it, stands at global position `index` >= 0."""
        period, position = divmod(index, self.PERIOD)
        chosen = int(self.set[position])
        number = period * int(self.in_period[chosen]) + int(self.before[position])
        return chosen, self.orders[chosen][number]
