"""From logits to the next token: the likeliest, or one drawn from what temperature, top-k and top-p leave."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    # Logits are divided by it before the draw; 0 for the likeliest token each time (greedy).
    temperature: float = 0.0
    # Draw among this many likeliest tokens; 0 for all.
    top_k: int = 0
    # Draw among the likeliest tokens that together have at least this probability (Holtzman et al. 2019).
    top_p: float = 1.0
    # Of the draws.
    seed: int = 1234

    def generator(self) -> torch.Generator:
        """A generator at the seed."""
        return torch.Generator().manual_seed(self.seed)


def pick(logits: torch.Tensor, how: Sampling, generator: torch.Generator) -> int:
    """A token id for logits `[vocab]`, which lie on the CPU like the generator."""
    if how.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(kept(logits, how).softmax(-1), 1, generator=generator))


def kept(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Logits at the temperature, minus infinity where a token is not to be drawn."""
    logits = logits.float() / how.temperature
    if 0 < how.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(how.top_k).values[-1], float("-inf"))
    if how.top_p < 1:
        ordered, ids = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of the likelier tokens: the first is always kept
        logits = logits.index_fill(0, ids[before >= how.top_p], float("-inf"))
    return logits
