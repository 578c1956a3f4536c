"""Clip thresholds by model size, by arithmetic alone. Nothing here imports torch."""

import math

# The field note's rule: parameters and the threshold given for them.
BY_SIZE = ((1e9, 1.0), (1e10, 0.1), (1e11, 0.01), (5e11, 0.001))
# What reports say they would have clipped.
STANDARD = (1.0, 0.1, 0.01, 0.001)


def by_model_size(parameters: float) -> float:
    """The rule's threshold: between the sizes it gives straight in log-log, beyond them the value of the nearest.

    Published runs from 14M to 671B parameters use 1.0, with a few of the largest at 0.25 to 0.3.
    """
    x = math.log(min(max(parameters, BY_SIZE[0][0]), BY_SIZE[-1][0]))
    for (small, high), (large, low) in zip(BY_SIZE, BY_SIZE[1:], strict=False):
        if x <= math.log(large):
            share = (x - math.log(small)) / (math.log(large) - math.log(small))
            return math.exp(math.log(high) + share * (math.log(low) - math.log(high)))
    return BY_SIZE[-1][1]
