"""A tokenizer for a text at hand: byte-level byte-pair encoding, learned by the `tokenizers` library."""

from collections.abc import Iterable
from pathlib import Path

from data.corpus import BadData

END = "<|endoftext|>"
LEAST = 257  # every byte, and END


def train(texts: Iterable[list[str]], vocab: int, file: Path) -> None:
    """Learns `vocab` tokens from batches of texts and writes them as a tokenizer.json; it holds words, not texts.

    No byte is unknown to it, and decoding gives back every text as it was. Raises BadData for too few tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < LEAST:
        raise BadData(f"vocab={vocab} is too small for tokenizer=bpe: every byte has a token, take {LEAST} or more.")
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    learned.train_from_iterator(texts, trainer)
    learned.save(str(file))
