"""Documents of text files of any size, read in parts: plain text or JSONL, as it is or compressed with gzip or zstd."""

import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.corpus import BadData

PART = 2**20  # bytes of text that are handled together
JSONL = {".jsonl", ".ndjson", ".json"}
COMPRESSED = {".gz", ".zst"}
BLANK = b" \t\r\n\v\f"


@dataclass(frozen=True)
class Part:
    """A piece of one file: lines of JSONL, or plain text, which is one document from its first part to its last.

    `place` is the number of its first line, or of its first byte; `read` how far the file on disk has been read.
    """

    file: str
    jsonl: bool
    place: int
    data: bytes
    last: bool
    read: int


def find(path: str) -> list[Path]:
    """The files that a path, a folder or a pattern with stars means, in order; raises BadData for none."""
    root = Path(path).expanduser()
    if root.is_dir():
        found = [file for file in root.rglob("*") if file.is_file()]
        found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(root).parts)]
    elif root.exists():
        found = [root]
    else:
        found = [Path(file) for file in glob.glob(str(root), recursive=True) if Path(file).is_file()]
    if not found:
        raise BadData(f"input={path} is no file, no folder with files in it, and no pattern that fits any.")
    return sorted(found)


def is_jsonl(file: Path, form: str) -> bool:
    """Whether a file is read as JSONL: what `form` says (text, jsonl), or for auto what its name says."""
    name = file.with_suffix("") if file.suffix in COMPRESSED else file
    return form == "jsonl" or (form == "auto" and name.suffix in JSONL)


def parts(file: Path, jsonl: bool) -> Iterator[Part]:
    """A file in parts of about PART bytes. Raises BadData when it cannot be read or is not the archive it should be."""
    try:
        with file.open("rb") as raw, _opened(file, raw) as stream:
            yield from (_lines if jsonl else _text)(str(file), stream, raw.tell)
    except EOFError as error:
        raise BadData(f"{file} is truncated: its compressed data stop in the middle.") from error
    except (OSError, zlib.error, _zstd().ZstdError) as error:
        raise BadData(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def documents(part: Part, key: str, skip_empty: bool, utf8: bool) -> list[tuple[bytes, bool]]:
    """The texts in a part, each with whether its document ends there.

    Raises BadData, naming file and line or byte, for text that is none, that is not UTF-8 where it has to be, and for
    documents without text unless `skip_empty`.
    """
    if part.jsonl:
        found = []
        for number, line in enumerate(part.data.splitlines(), part.place):
            if line.strip():
                text = _from_json(part.file, number, line, key)
                if text:
                    found.append((text, True))
                elif not skip_empty:
                    raise BadData(f"{part.file}, line {number}: the document is empty; empty=skip leaves it out.")
        return found
    if b"\0" in part.data:
        raise BadData(f"{part.file} is not a text file: byte {part.place + part.data.index(0)} is zero.")
    if utf8:
        try:
            part.data.decode()
        except UnicodeDecodeError as error:
            place = part.place + error.start
            raise BadData(f"{part.file} is not UTF-8 at byte {place}: convert it, or take tokenizer=bytes.") from error
    if not part.data and part.place == 0:
        if not skip_empty:
            raise BadData(f"{part.file} is empty; empty=skip leaves such files out.")
        return []
    return [(part.data, part.last)]


def _from_json(file: str, number: int, line: bytes, key: str) -> bytes:
    try:
        text = json.loads(line)[key]
        return text.encode()
    except (KeyError, TypeError, AttributeError):
        raise BadData(
            f'{file}, line {number}: there is no text under "{key}"; say which key it is: key=NAME.'
        ) from None
    except ValueError as error:
        raise BadData(f"{file}, line {number} is not JSON in UTF-8: {error}.") from error


def _lines(file: str, stream, read: Callable[[], int]) -> Iterator[Part]:
    number = 1
    while lines := stream.readlines(PART):
        yield Part(file, True, number, b"".join(lines), True, read())
        number += len(lines)


def _text(file: str, stream, read: Callable[[], int]) -> Iterator[Part]:
    place, held = 0, stream.read(PART)
    while more := stream.read(PART):
        cut = _cut(held)
        yield Part(file, False, place, held[:cut], False, read())
        place, held = place + cut, held[cut:] + more
    yield Part(file, False, place, held, True, read())


def _cut(text: bytes) -> int:
    """Where a long text is cut in two: after the last line end that stands between two characters that are not blank.

    A tokenizer takes blanks together, so elsewhere the halves could become other tokens than the whole.
    """
    at = len(text)
    while (at := text.rfind(b"\n", 1, at)) > 0:
        if text[at - 1] not in BLANK and text[at + 1 : at + 2].strip(BLANK):
            return at + 1
    if at := text.rfind(b"\n") + 1:
        return at
    at = len(text)
    while at > 1 and text[at - 1] & 0xC0 == 0x80:  # not inside a character
        at -= 1
    return at - 1 if at > 1 and text[at - 1] >= 0xC0 else at


def _opened(file: Path, raw):
    if file.suffix == ".gz":
        return gzip.open(raw)
    return _zstd().open(raw) if file.suffix == ".zst" else raw


def _zstd():
    from backports import zstd

    return zstd
