"""Which token files a run reads: `data.path` as prefixes and weights, and what is recorded beside each of them.

A prefix stands for PREFIX.bin and PREFIX.idx. PREFIX.json, which data.prepare writes and Megatron-LM does not, names
the tokenizer. Nothing here imports torch or NumPy: a configuration is checked with it.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from data.corpus import BadData

FORM = "PREFIX, or [PREFIX,PREFIX], or [WEIGHT,PREFIX,WEIGHT,PREFIX]"


@dataclass(frozen=True)
class Source:
    """A pair of files; `weight` is its share of the samples before normalization, None for that of its tokens."""

    prefix: str
    weight: float | None = None


def sources(path) -> list[Source]:
    """The files that `data.path` names: one prefix, a list of them, or with weights, in turn as in Megatron-LM or as
    a mapping of prefixes to weights.

    Raises BadData when it is none of these.
    """
    if isinstance(path, str) and path.strip():
        return [Source(_prefix(path))]
    if hasattr(path, "items"):
        path = [word for prefix, weight in path.items() for word in (weight, prefix)]
    words = list(path) if not isinstance(path, str) and hasattr(path, "__iter__") else []
    if words and all(isinstance(word, str) for word in words):
        found = [Source(_prefix(word)) for word in words]
    elif words and len(words) % 2 == 0:
        found = []
        for weight, prefix in zip(words[::2], words[1::2], strict=True):
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not isinstance(prefix, str):
                raise BadData(f"data.path={path} has {weight!r}, {prefix!r} where a weight and a prefix are expected.")
            if not 0 < weight < math.inf:
                raise BadData(f"data.path={path} gives {prefix} the weight {weight}: take a number above 0.")
            found.append(Source(_prefix(prefix), float(weight)))
    else:
        raise BadData(f"data.path={path} names no token files: write data.path={FORM}.")
    prefixes = [source.prefix for source in found]
    if twice := next((prefix for prefix in prefixes if prefixes.count(prefix) > 1), None):
        raise BadData(f"data.path={path} has {twice} twice: give it once, with the sum of the weights.")
    return found


def record(prefix: str) -> dict:
    """What data.prepare wrote about PREFIX, empty for files of Megatron-LM's own tool; raises BadData when damaged."""
    file = Path(f"{prefix}.json")
    try:
        found = json.loads(file.read_bytes())
        if not isinstance(found["tokenizer"], str) or not isinstance(found["eod"], int | None):
            raise ValueError("tokenizer or eod has the wrong type")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadData(f"{file} is damaged: {error!r}; prepare the files again, or remove it.") from error


def recorded_tokenizer(prefix: str) -> str | None:
    """The tokenizer that made PREFIX: `bytes`, or the file that lies beside it; None when nobody wrote it down."""
    name = record(prefix).get("tokenizer")
    return name if name in (None, "bytes") else str(Path(prefix).parent / name)


def tokenizer_name(data) -> tuple[str | None, int | None]:
    """The tokenizer of a configuration's data, as given or recorded, and the id that ends a document if recorded.

    (None, None) when no file of data=megatron has one on record.
    """
    if data.kind != "megatron":
        return data.tokenizer, None
    found = [source.prefix for source in sources(data.path) if record(source.prefix)]
    eod = record(found[0])["eod"] if found else None
    return data.tokenizer or (recorded_tokenizer(found[0]) if found else None), eod


def _prefix(path: str) -> str:
    """The path without .bin or .idx, which a person's shell completes."""
    path = str(Path(path.strip()).expanduser())
    return path[:-4] if path.endswith((".bin", ".idx")) else path
