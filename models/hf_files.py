"""The safetensors files of a Hugging Face model folder: what is in them, checked before anything is read.

Only safetensors are read. `.bin` files are pickles, and reading a pickle executes what is in it.
"""

import json
import struct
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = "config.json"
FOLDER = "huggingface"  # of an imported checkpoint, for what lay beside the weights
_LONGEST_HEADER = 100_000_000  # the format's own limit


class BadWeights(Exception):
    """Files that cannot be taken over; the sentence names the file and what is wrong with it."""

    is_sentence = True  # a traceback would add nothing


@dataclass(frozen=True)
class Stored:
    """A tensor as a file's header describes it; `dtype` as safetensors writes it (F32, BF16, F16)."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Folder:
    """A model folder: its config.json, its tensors, and the free text in each file's header."""

    path: Path
    config: dict
    tensors: dict[str, Stored]
    texts: dict[str, dict[str, str]] = field(default_factory=dict)

    def names(self) -> dict[str, list[str]]:
        """The tensors of each file, in the order in which they lie there."""
        found: dict[str, list[str]] = {}
        for name, stored in self.tensors.items():
            found.setdefault(stored.file, []).append(name)
        return found


def read_folder(path: Path) -> Folder:
    """Read the headers of a model folder; raises BadWeights."""
    if not path.is_dir():
        raise BadWeights(f"{path} is not a folder.")
    if (path / SINGLE).exists():
        listed = None
        files = [SINGLE]
    elif (path / INDEX).exists():
        listed = _index(path / INDEX)
        files = sorted(set(listed.values()))
    else:
        raise BadWeights(_nothing(path))
    folder = Folder(path, _json(path / CONFIG), {})
    for file in files:
        tensors, folder.texts[file] = _header(path / file)
        for name, stored in tensors.items():
            if name in folder.tensors:
                raise BadWeights(f"{name} is in {path / folder.tensors[name].file} and in {path / file}.")
            if listed is not None and listed.get(name) != file:
                raise BadWeights(f"{path / file} holds {name}, which {path / INDEX} does not say.")
            folder.tensors[name] = stored
    absent = sorted((listed or {}).keys() - folder.tensors.keys())
    if absent:
        raise BadWeights(f"{path / listed[absent[0]]} lacks {some(absent)}, which {path / INDEX} says it holds.")
    return folder


def some(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def opened(path: Path):
    """A safetensors file, open for reading; raises BadWeights when it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise BadWeights(f"{path} is damaged: {error}.") from error
    except OSError as error:
        raise BadWeights(f"{path} cannot be read: {error.strerror or error}.") from error


def _nothing(path: Path) -> str:
    pickles = sorted([*path.glob("*.bin"), *path.glob("*.pth"), *path.glob("*.pt")])
    if not pickles:
        return f"{path} holds no Hugging Face weights: there is neither {SINGLE} nor {INDEX}."
    return (
        f"{path} holds {pickles[0].name}, a pickle, and no safetensors: reading a pickle can run what is hidden in it, "
        "so it is not opened. Take the model's safetensors files, or write them with Transformers' save_pretrained."
    )


def _json(path: Path, unique: Callable | None = None) -> dict:
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except FileNotFoundError:
        raise BadWeights(f"{path} is missing.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadWeights(f"{path} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise BadWeights(f"{path} is not a mapping of names to values.")
    return content


def _index(path: Path) -> dict[str, str]:
    listed = _json(path, _unique(path)).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise BadWeights(f"{path} has no weight_map of tensors to files.")
    for file in listed.values():
        if Path(file).name != file:
            raise BadWeights(f"{path} names {file!r}, which is not a file of the folder.")
    return listed


def _unique(path: Path) -> Callable:
    def pairs(items: list[tuple]) -> dict:
        found = dict(items)
        if len(found) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadWeights(f"{path} has {twice!r} twice.")
        return found

    return pairs


def _header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors in the order of their data, and the header's free text."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError("no header")
            header = json.loads(file.read(length), object_pairs_hook=_unique(path))
        text = header.pop("__metadata__", {})
        ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        found = {name: Stored(path.name, about["dtype"], tuple(about["shape"])) for name, about in ordered}
    except FileNotFoundError:
        raise BadWeights(f"{path} is missing.") from None
    except OSError as error:
        raise BadWeights(f"{path} cannot be read: {error.strerror}.") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise BadWeights(f"{path} is not a safetensors file, or was cut off.") from None
    with opened(path):  # the library checks what is left: sizes, offsets, the end of the file
        return found, text
