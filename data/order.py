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
