"""The text that a model writes at the end of its training."""

from models import decode
from models.sampling import Sampling

TEMPERATURE = 0.6
_FIRST_TOKENS = 40


def sample(chunks, tokenizer, prompt: str, length: int, seq_len: int, seed: int) -> str:
    """Continue `prompt` by `length` tokens; every rank must call it and gets the same text."""
    text = tokenizer.encode(prompt) or [tokenizer.eod or 0]
    known = len(tokenizer.decode(text))  # which may differ from the prompt: a tokenizer can change blanks
    how, cached = Sampling(TEMPERATURE, seed=seed), decode.can_cache(chunks)
    text += decode.continued(chunks, text, length, seq_len, tokenizer.vocab_size, how, cached)
    return tokenizer.decode(text)[known:]


def first_words(corpus) -> str:
    """A prompt from text that the model has not been trained on: the first words of the held-out data."""
    text = corpus.tokenizer.decode(corpus.val[0][:_FIRST_TOKENS]).rstrip("\ufffd")
    return text[: max(text.rfind(" "), text.rfind("\n"), 0)] or text
