"""Samples of token files, memory-mapped through Megatron-core's IndexedDataset, and the documents that are held out.

Megatron's GPTDataset is not used for the samples: it shuffles documents over as many epochs as the number of samples
it is asked for needs, and treats the last of them apart, so a run with more steps would see other samples from the
first one on. Here a sample is a window of the stream of documents in the order of the file, and data/order.py says
which comes when.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from data.blend import Blend, Joined
from data.corpus import BadData
from data.indexed import Index, open_index
from data.padding import filled, windows
from data.sources import sources

HELD_OUT_KEY = 0x5EED  # the numbers that decide which documents are held out; another key is another split


class Stored(Sequence):
    """Windows of seq_len + 1 tokens of some documents of a pair of files; neighbours share one token.

    The documents are given as runs of neighbouring ones: `first` and `length` [runs], in tokens. With `tail` the last
    window may be short.
    """

    def __init__(self, index: Index, first: np.ndarray, length: np.ndarray, seq_len: int, vocab: int, tail: bool):
        self.index, self.seq_len, self.vocab, self.tail = index, seq_len, vocab, tail
        self.first, self.ends = first, np.cumsum(length)

    @property
    def tokens(self) -> int:
        """Tokens of these documents."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def __len__(self) -> int:
        return windows(self.tokens, self.seq_len, self.tail)

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index`, int64 [seq_len + 1]; raises BadData when it has an id that the model does not know."""
        position = range(len(self))[index] * self.seq_len
        left, parts = min(self.seq_len + 1, self.tokens - position), []
        run = int(np.searchsorted(self.ends, position, side="right"))
        while left:
            take = min(left, int(self.ends[run]) - position)
            start = int(self.first[run]) + position - (int(self.ends[run - 1]) if run else 0)
            part = self._file.bin_reader.read(self.index.dtype, take, start * self.index.dtype.itemsize)
            self.index.check_ids(part, self.vocab, start)
            parts.append(part)
            position, left, run = position + take, left - take, run + 1
        return filled(np.concatenate(parts), self.seq_len)

    @cached_property
    def _file(self):
        # Only where samples are read: the process that checks a run imports no torch.
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        return IndexedDataset(self.index.prefix)


def split(index: Index, share: float, seq_len: int, vocab: int) -> tuple[Stored, Stored]:
    """Training and validation samples of a pair of files, of different documents.

    Whether a document is held out depends on its number in the file alone, so documents that are appended move no
    other. Where too few are for one window, the next ones in the order of their random numbers are held out too; of a
    single document it is the end.
    """
    if index.documents == 1:
        cut = max(index.tokens - max(int(index.tokens * share), seq_len + 1), 0)
        spans = np.array([[0, cut], [cut, index.tokens]])
        return tuple(Stored(index, spans[i : i + 1, 0], np.diff(spans[i]), seq_len, vocab, bool(i)) for i in (0, 1))
    each = np.diff(index.starts)
    numbers = np.random.Philox(key=HELD_OUT_KEY).random_raw(index.documents)
    held = numbers < np.uint64(int(share * 2**64))
    if held.all() or each[held].sum() < seq_len + 1:
        order = np.argsort(numbers, kind="stable")
        enough = int(np.searchsorted(np.cumsum(each[order]), seq_len + 1)) + 1
        held = np.zeros_like(held)
        held[order[: min(enough, index.documents - 1)]] = True
    # Neighbouring documents on the same side are one run.
    borders = np.concatenate([[0], np.flatnonzero(np.diff(held)) + 1, [index.documents]])
    first, length = index.starts[borders[:-1]], np.diff(index.starts[borders])
    side = held[borders[:-1]]
    return tuple(Stored(index, first[side == s], length[side == s], seq_len, vocab, s) for s in (False, True))


def load(cfg, tokens_of) -> tuple:
    """The fields of data.batches.Corpus for data=megatron: training samples, held-out samples, tokenizer and facts.

    Raises BadData for files that are damaged, or have too little text or other tokens than the model.
    """
    seq_len, vocab, given = cfg.train.seq_len, cfg.model.vocab, sources(cfg.data.path)
    train, val, files, fingerprint = [], [], [], hashlib.sha256()
    for source in given:
        index = open_index(source.prefix)
        first = index.first_tokens()
        index.check_ids(first, vocab, 0)
        parts = split(index, cfg.data.val_share, seq_len, vocab)
        if not len(parts[0]):
            raise BadData(
                f"Too little text in {source.prefix}: {parts[0].tokens} training tokens are less than a sequence of "
                f"train.seq_len={seq_len} and its last target; use more text or a smaller train.seq_len."
            )
        train.append(parts[0])
        val.append(parts[1])
        # The index tells files apart but for texts of the very same lengths, so their first tokens count too.
        fingerprint.update(index.sha256.encode() + first.tobytes())
        files.append({"prefix": source.prefix, "documents": index.documents, "tokens": index.tokens})
        files[-1] |= {"dtype": str(index.dtype), "idx_sha256": index.sha256}
    weights = [source.weight or samples.tokens for source, samples in zip(given, train, strict=True)]
    if len(given) > 1:
        fingerprint.update(repr(weights).encode())
    facts = {
        "source": _in_words(given, weights),
        "tokens": sum(samples.tokens for samples in train),
        "val_tokens": sum(samples.tokens for samples in val),
        "fingerprint": fingerprint.hexdigest()[:12],
        "files": files,
    }
    one = len(given) == 1
    return train[0] if one else Blend(train, weights), val[0] if one else Joined(val), tokens_of, facts


def _in_words(given, weights: list[float]) -> str:
    if len(given) == 1:
        return given[0].prefix
    shares = [weight / sum(weights) for weight in weights]
    return " + ".join(f"{share:.1%} {source.prefix}" for share, source in zip(shares, given, strict=True))
