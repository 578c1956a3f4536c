"""Parts of texts to tokens, in one process a core, in order and with little in memory at a time."""

import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from data.corpus import BadData
from data.texts import PART, Part, documents
from data.tokenizer import Tokenizer, open_tokenizer

AHEAD = 3  # batches a worker that are on their way: enough to keep it busy, little enough to fit in memory


@dataclass(frozen=True)
class Settings:
    """How texts are read and tokenized: `tokenizer` by name, `eod` the id that ends a document or None."""

    tokenizer: str
    eod: int | None
    key: str
    skip_empty: bool


@dataclass
class Encoded:
    """A batch as tokens: those of all its texts in one array, `lengths` of each, and whether its document `ends`."""

    tokens: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    text_bytes: int
    parts: list[tuple[str, int]]  # of which file how much was read


class Workers:
    """Processes that tokenize; use as a context."""

    def __init__(self, count: int, settings: Settings):
        self.count = count
        # Spawned, as neither the libraries' threads nor torch survive a fork.
        self._pool = ProcessPoolExecutor(count, get_context("spawn"), _start, (os.getpid(), settings))
        self._started = [self._pool.submit(os.getpid) for _ in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._pool.shutdown(cancel_futures=True)

    def wait(self) -> None:
        """Until all have started."""
        for started in self._started:
            started.result()

    def encoded(self, parts: Iterator[Part]) -> Iterator[Encoded]:
        """The parts as tokens, in their order. Raises BadData for text that is none, or when a worker is killed."""
        waiting = deque()
        try:
            for batch in _batches(parts):
                waiting.append(self._pool.submit(_encode, batch))
                if len(waiting) >= AHEAD * self.count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise BadData("A worker was killed, most likely as memory ran out: take fewer with workers=N.") from error


def _batches(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Parts of small files go together."""
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part.data)
        if size >= PART // 2:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_worker: tuple[Tokenizer, Settings] | None = None  # what a worker process keeps from its start


def _start(parent: int, settings: Settings) -> None:
    from parallel import rank_process

    global _worker
    os.environ[rank_process.PARENT_PID] = str(parent)
    rank_process.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one thread
    _worker = (open_tokenizer(settings.tokenizer), settings)


def _encode(batch: list[Part]) -> Encoded:
    tokenizer, settings = _worker
    texts, ends, names = [], [], []
    for part in batch:
        for text, end in documents(part, settings.key, settings.skip_empty, settings.tokenizer != "bytes"):
            texts.append(text)
            ends.append(end)
            names.append(part.file)
    closing = settings.eod is not None
    pieces, lengths = [], []
    for tokens, end, name in zip(tokenizer.encode_batch(texts), ends, names, strict=True):
        pieces.append(tokens)
        if end and closing:
            pieces.append(np.array([settings.eod], tokens.dtype))
        lengths.append(len(tokens) + (end and closing))
        if not lengths[-1]:
            raise BadData(f"{name}: the tokenizer makes no token of one of its texts.")
    tokens = np.concatenate(pieces) if pieces else np.array([], np.uint8)
    return Encoded(tokens, np.array(lengths, np.int32), np.array(ends, bool), sum(map(len, texts)), [
        (part.file, part.read) for part in batch
    ])  # fmt: skip
