"""Held-out data to its last token: windows of which the last may be short and is filled up with what never counts."""

import numpy as np

PADDING = -1  # in the place of a token that is not there


def windows(tokens: int, seq_len: int, tail: bool) -> int:
    """How many windows of seq_len inputs `tokens` tokens make; with `tail` the last may have fewer."""
    targets = max(tokens - 1, 0)
    return targets // seq_len + (tail and targets % seq_len > 0)


def filled(window: np.ndarray, seq_len: int) -> np.ndarray:
    """A window with PADDING at its end, int64 [seq_len + 1]."""
    return np.pad(window.astype(np.int64), (0, seq_len + 1 - len(window)), constant_values=PADDING)
