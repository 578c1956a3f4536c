"""Megatron's pair of files, PREFIX.idx and PREFIX.bin: whether it is whole, and what it says.

Tokens are read by Megatron-core's own IndexedDataset (data/stored.py). It trusts an index: a damaged one ends in an
assertion without a name, or in other tokens. And it imports torch, which the process that checks a run does without.
So the index is read here first, as the format is: header, version and type, sizes, then lengths in tokens and offsets
in bytes of all sequences, and the first sequence of each document.
"""

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.corpus import BadData

HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, documents + 1
MAGIC = b"MMIDIDX\0\0"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
AT_ONCE = 2**20  # sequences looked at together
FIRST = 2**16  # tokens that are looked at when a file is opened


@dataclass(frozen=True)
class Index:
    """A pair of files that fits together. `starts` [documents + 1] is where each document begins, in tokens."""

    prefix: str
    dtype: np.dtype
    starts: np.ndarray
    sha256: str

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        """Documents, none of them empty."""
        return len(self.starts) - 1

    def first_tokens(self) -> np.ndarray:
        """The first FIRST tokens, int64: enough to see a wrong vocabulary before anything starts."""
        return np.fromfile(f"{self.prefix}.bin", self.dtype, min(FIRST, self.tokens)).astype(np.int64)

    def check_ids(self, ids: np.ndarray, vocab: int, position: int) -> None:
        """Raises BadData when one of `ids`, which stand from token `position` on, is not in [0, vocab)."""
        if ids.min() >= 0 and ids.max() < vocab:
            return
        at = int(np.argmax((ids < 0) | (ids >= vocab)))
        document = int(np.searchsorted(self.starts, position + at, side="right")) - 1
        raise BadData(
            f"{self.prefix}.bin has token id {ids[at]} in document {document} (token {position + at}), beyond "
            f"model.vocab={vocab}: set model.vocab to the size of the tokenizer that made it"
            + (f", at least {int(ids.max()) + 1}." if ids.min() >= 0 else "; ids below 0 are damage.")
        )


def open_index(prefix: str) -> Index:
    """Reads and checks PREFIX.idx against PREFIX.bin; raises BadData with a sentence that names the file."""
    file = Path(f"{prefix}.idx")
    try:
        size, stored = file.stat().st_size, os.path.getsize(f"{prefix}.bin")
        with file.open("rb") as opened:
            head = opened.read(HEADER.size)
            opened.seek(0)
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise BadData(f"{error.filename} cannot be read: {error.strerror}.") from error
    if len(head) < HEADER.size:
        raise BadData(f"{file} is truncated: {size} bytes are less than the {HEADER.size} of its header.")
    magic, version, code, sequences, entries = HEADER.unpack(head)
    if magic != MAGIC:
        raise BadData(f"{file} is not an index of Megatron's: it begins with {magic!r}, not {MAGIC!r}.")
    if version != 1 or code not in DTYPES:
        raise BadData(f"{file} is damaged or of another version: version {version}, type {code} of tokens.")
    needed = HEADER.size + sequences * (4 + 8) + entries * 8
    if size == needed + sequences and sequences:
        raise BadData(f"{file} has a mode for each sequence: multimodal data is not read here.")
    if size != needed:
        what = "is truncated" if size < needed else "is damaged"
        raise BadData(
            f"{file} {what}: {sequences} sequences in {entries - 1} documents take {needed} bytes, it has {size}."
        )
    if entries < 2 or not sequences:
        raise BadData(f"{file} has no documents.")
    dtype = np.dtype(DTYPES[code])
    lengths = np.memmap(file, np.int32, "r", HEADER.size, (sequences,))
    offsets = np.memmap(file, np.int64, "r", HEADER.size + 4 * sequences, (sequences,))
    firsts = np.memmap(file, np.int64, "r", HEADER.size + 12 * sequences, (entries,))
    _check_documents(file, firsts, sequences)
    tokens = _check_offsets(file, lengths, offsets, dtype.itemsize)
    if stored != tokens * dtype.itemsize:
        what = "is truncated" if stored < tokens * dtype.itemsize else "is another file's"
        raise BadData(
            f"{prefix}.bin {what}: its index has {tokens} tokens, which take {tokens * dtype.itemsize} bytes, "
            f"it has {stored}."
        )
    each = np.add.reduceat(lengths, firsts[:-1], dtype=np.int64)
    if not each.all():
        raise BadData(_empty(file, int(np.argmin(each))))
    return Index(prefix, dtype, np.concatenate([[0], np.cumsum(each)]), sha256)


def _check_documents(file: Path, firsts: np.ndarray, sequences: int) -> None:
    steps = np.diff(firsts)
    if firsts[0] != 0 or firsts[-1] != sequences or (steps < 0).any():
        raise BadData(f"{file} is damaged: its documents do not cover its {sequences} sequences in order.")
    if not steps.all():
        raise BadData(_empty(file, int(np.argmin(steps))))


def _check_offsets(file: Path, lengths: np.ndarray, offsets: np.ndarray, itemsize: int) -> int:
    """All tokens; each sequence has to begin where the one before it ends."""
    tokens = 0
    for at in range(0, len(lengths), AT_ONCE):
        some = lengths[at : at + AT_ONCE].astype(np.int64)
        ends = tokens + np.cumsum(some)
        expected = (ends - some) * itemsize
        wrong = (some < 0) | (offsets[at : at + AT_ONCE] != expected)
        if wrong.any():
            place = at + int(np.argmax(wrong))
            raise BadData(f"{file} is damaged: sequence {place} does not begin where the one before it ends.")
        tokens = int(ends[-1])
    return tokens


def _empty(file: Path, number: int) -> str:
    return f"{file}: document {number} is empty; leave out empty documents when you prepare the files."
