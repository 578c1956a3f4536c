"""From the configuration to the micro-batches of one data-parallel rank, one step ahead of the training loop."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from data import stored
from data.blend import Blend, Joined
from data.corpus import BadData, documents
from data.order import Order
from data.padding import PADDING, filled, windows
from data.tokenizer import Tokenizer, tokenizer

MOCK_WINDOWS = 2**16


class Windows(Sequence):
    """Samples cut from a stream of tokens: window i starts at token i·seq_len and ends with the next one's first token.

    Windows share no input position, and every token but the first is a target once, with `tail` to the very last one.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, tail: bool = False):
        self.tokens, self.seq_len, self.tail = tokens, seq_len, tail

    def __len__(self) -> int:
        return windows(len(self.tokens), self.seq_len, self.tail)

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index`, int64 [seq_len + 1]: inputs are all but the last token, targets all but the first."""
        start = range(len(self))[index] * self.seq_len
        return filled(self.tokens[start : start + self.seq_len + 1], self.seq_len)


class Mock(Sequence):
    """Uniformly random tokens, a pure function of (stream, index): for timing at any size; nothing to be learned."""

    def __init__(self, vocab: int, seq_len: int, stream: int):
        self.vocab, self.seq_len, self.stream = vocab, seq_len, stream

    def __len__(self) -> int:
        return MOCK_WINDOWS

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index`, int64 [seq_len + 1], every id in [0, vocab)."""
        random = np.random.Philox(key=[self.stream, range(len(self))[index]]).random_raw(self.seq_len + 1)
        return (random % self.vocab).astype(np.int64)


Samples = Windows | Mock | stored.Stored | Blend | Joined


@dataclass
class Corpus:
    """What a run trains and is validated on.

    `facts` says in plain values what it is: source, tokens, val_tokens, and a fingerprint by which two machines can
    tell that they train on the same text.
    """

    train: Samples
    val: Samples
    tokenizer: Tokenizer
    facts: dict


def load(cfg) -> Corpus:
    """Opens the corpus that `cfg` (conf.schema.Config) asks for.

    Raises BadData when it cannot be used, is too little, or has token ids that the model does not know.
    """
    seq_len, vocab = cfg.train.seq_len, cfg.model.vocab
    tokens_of = tokenizer(cfg)
    if cfg.data.kind == "mock":
        facts = {"source": f"random tokens below {vocab}, nothing to be learned"}
        return Corpus(Mock(vocab, seq_len, stream=0), Mock(vocab, seq_len, stream=1), tokens_of, facts)
    if tokens_of.vocab_size > vocab:
        raise BadData(
            f"data.tokenizer={cfg.data.tokenizer} makes {tokens_of.vocab_size} different tokens but "
            f"model.vocab={vocab}; use model.vocab={tokens_of.vocab_size} or more."
        )
    read = stored.load if cfg.data.kind == "megatron" else _text
    corpus = Corpus(*read(cfg, tokens_of))
    facts, whole = corpus.facts, windows(corpus.facts["val_tokens"], seq_len, tail=False)
    if len(corpus.train) < cfg.train.global_batch or not whole:
        raise BadData(
            f"Too little text in {facts['source']}: {facts['tokens']} training and {facts['val_tokens']} validation "
            f"tokens make {len(corpus.train)} and {whole} sequences of train.seq_len={seq_len}, but one step takes "
            f"train.global_batch={cfg.train.global_batch}; use more text, or a smaller train.seq_len or global_batch."
        )
    return corpus


def _text(cfg, tokens_of: Tokenizer) -> tuple[Windows, Windows, Tokenizer, dict]:
    """The fields of the Corpus of text that is tokenized here and kept in memory."""
    text = documents(cfg.data, cfg.train.seq_len)
    train, val = (_stream(part, tokens_of) for part in (text.train, text.val))
    fingerprint = hashlib.sha256(train)
    fingerprint.update(val)
    facts = {
        "source": text.source,
        "tokens": len(train),
        "val_tokens": len(val),
        "fingerprint": fingerprint.hexdigest()[:12],
    }
    seq_len = cfg.train.seq_len
    return Windows(train, seq_len), Windows(val, seq_len, tail=True), tokens_of, facts


def _stream(texts: list[bytes], tokens_of: Tokenizer) -> np.ndarray:
    """All documents in one array of token ids, each followed by the token that ends a document, if there is one."""
    documents = tokens_of.encode_batch(texts)
    end = np.array([] if tokens_of.eod is None else [tokens_of.eod], documents[0].dtype)
    return np.concatenate([part for document in documents for part in (document, end)])


class Batches:
    """The micro-batches of one data-parallel rank.

    Rank r of d takes the r-th of d equal runs of the step's `global_batch` samples, so the samples of a step are the
    same whatever d and the micro-batch are. Without a seed samples come in order, from the first again after the last.
    """

    def __init__(self, samples: Samples, train, dp_rank: int, dp_size: int, seed: int | None):
        self.samples = samples
        self.order = samples.order(seed) if isinstance(samples, Blend) else Order(len(samples), seed)
        self.micro_batch, self.global_batch = train.micro_batch, train.global_batch
        self.share = train.global_batch // dp_size
        self.first = dp_rank * self.share
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future] | None = None

    def step(self, step: int) -> list[np.ndarray]:
        """Micro-batches of a step counted from 0, each int64 [micro_batch, seq_len + 1]; reads the next step ahead."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._thread.submit(self._read, step))
        result = self._ahead[1].result()
        self._ahead = (step + 1, self._thread.submit(self._read, step + 1))
        return result

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, step: int) -> list[np.ndarray]:
        start = step * self.global_batch + self.first
        return [
            np.stack([self._sample(i) for i in range(at, at + self.micro_batch)])
            for at in range(start, start + self.share, self.micro_batch)
        ]

    def _sample(self, index: int) -> np.ndarray:
        return self.samples[self.order[index]]


class HeldOut(Batches):
    """The first `sequences` samples in order (`all`: every one), each once: what a model is validated on.

    They come in `steps` global batches; the last one is filled up with samples of PADDING alone, so that every
    data-parallel rank has as many micro-batches as the others.
    """

    def __init__(self, samples: Samples, train, dp_rank: int, dp_size: int, sequences: int | str):
        super().__init__(samples, train, dp_rank, dp_size, None)
        self.count = len(samples) if sequences == "all" else min(sequences, len(samples))
        self.steps = -(-self.count // self.global_batch)

    def _sample(self, index: int) -> np.ndarray:
        return self.samples[index] if index < self.count else np.full_like(self.samples[0], PADDING)
