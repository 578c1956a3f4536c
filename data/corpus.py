"""Where text comes from: documents for training and other documents for validation.

A document is the bytes of one file. Which files are held out depends on each file's own name only, so adding a file
moves no other file from one side to the other.
"""

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Tests, generated tables and help pages (one file of 0.7 MB), and whatever is installed beside the library.
STDLIB_LEFT_OUT = set("test tests idle_test encodings pydoc_data site-packages dist-packages __pycache__".split())


class BadData(Exception):
    """The data cannot be used; the message is one sentence that names the file or key and what is wrong with it."""

    is_sentence = True  # a traceback would add nothing


@dataclass
class Documents:
    """Text before tokenization. `source` says in words where it is from."""

    train: list[bytes]
    val: list[bytes]
    source: str


def documents(data, seq_len: int) -> Documents:
    """Reads the text that `data` (conf.schema.Data) names, split into training and validation documents.

    Raises BadData for a path that is missing, unreadable, empty or not text.
    """
    if data.kind == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = _python_files(root)
        if not files:
            raise BadData(
                f"data=stdlib: this Python ships without the source text of its library ({root}); "
                "use data=text data.path=... instead."
            )
        source = f"source text of the standard library of Python {platform.python_version()}"
    else:
        root, files = _text_files(data.path)
        source = str(root)
    # A text that lies there twice counts once, or its copy could be both trained on and held out.
    names: dict[bytes, str] = {}
    for file in files:
        names.setdefault(_read(file, data.tokenizer != "bytes"), file.relative_to(root).as_posix())
    texts = {name: text for text, name in names.items() if text}
    if not texts:
        raise BadData(f"data.path={root} holds no text: {'the file is' if root.is_file() else 'all files are'} empty.")
    # One window and its last target are the least that validation can use.
    split = _split_files if len(texts) > 1 else _split_text
    train, val = split(texts, data.val_share, seq_len + 1)
    return Documents(train, val, source)


def _python_files(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - STDLIB_LEFT_OUT)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def _text_files(path: str | None) -> tuple[Path, list[Path]]:
    if not path:
        raise BadData("data=text needs data.path: a text file, or a folder of text files.")
    root = Path(path).expanduser()
    if root.is_file():
        return root, [root]
    if not root.is_dir():
        raise BadData(f"data.path={path} does not exist (looked for {root.absolute()}).")
    # Hidden files and folders (.git, .DS_Store) are not what a person means by "my texts".
    found = [file for file in sorted(root.rglob("*")) if file.is_file()]
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(root).parts)]
    if not found:
        raise BadData(f"data.path={path} is a folder without files.")
    return root, found


def _read(file: Path, utf8: bool) -> bytes:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}.") from error
    if b"\0" in text:
        raise BadData(f"{file} is not a text file: byte {text.index(0)} is zero. Move it out of data.path.")
    if utf8:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise BadData(f"{file} is not UTF-8 at byte {error.start}: take data.tokenizer=bytes.") from error
    return text


def _split_files(texts: dict[str, bytes], share: float, least: int) -> tuple[list[bytes], list[bytes]]:
    """Holds out the files whose name hashes below `share`, and the next ones in hash order until `least` bytes are."""
    held, size = set(), 0
    by_hash = sorted(texts, key=_hash)
    for name in by_hash[:-1]:
        if _hash(name) >= share and size >= least:
            break
        held.add(name)
        size += len(texts[name])
    train = [text for name, text in texts.items() if name not in held]
    return train, [text for name, text in texts.items() if name in held]


def _split_text(texts: dict[str, bytes], share: float, least: int) -> tuple[list[bytes], list[bytes]]:
    """Holds out the end of the only file, from the start of a line."""
    (text,) = texts.values()
    cut = len(text) - max(int(len(text) * share), least)
    cut = text.rfind(b"\n", 0, max(cut, 0)) + 1 or max(cut, 0)
    return [text[:cut]], [text[cut:]]


def _hash(name: str) -> float:
    """A number in [0, 1) that depends on nothing but the name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8]) / 2**64
