"""How text becomes token ids and back: bytes, a Hugging Face `tokenizer.json`, or a SentencePiece `.model`.

Nothing here imports torch, and each library is imported where it is used: a configuration is checked without them.
"""

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path

from data.corpus import BadData
from data.sources import tokenizer_name

# In this order they end a document, where no file beside the tokenizer says which token does.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|endofsequence|>")
FILES = {".json": "tokenizer.json", ".model": "tokenizer.model"}


class Bytes:
    """Every byte is a token: 256 ids, nothing to learn, nothing to download, any text in any encoding."""

    vocab_size = 256
    # Text has no zero bytes (data.corpus refuses them), so zero is free to end a document.
    eod = 0

    def id_of(self, token: str) -> None:
        """Bytes have no names."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(text.encode())

    def encode_batch(self, texts: list[bytes]) -> list:
        """Token ids of each text, given in UTF-8 (or any other encoding), as arrays of uint8."""
        import numpy as np

        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids) -> str:
        """Text of token ids; bytes that are no UTF-8, and ids that are no bytes, show as the replacement character."""
        known = (int(token) if 0 <= token < self.vocab_size else 0xFF for token in ids)
        return bytes(known).decode("utf-8", errors="replace")


class HuggingFace:
    """A `tokenizer.json` of the `tokenizers` library, without the tokens that it would add around a text.

    `eod` is the id of the token that ends a document: what `tokenizer_config.json` beside it calls `eos_token`, else
    the first of ENDS that it knows; None when there is no such token.
    """

    def __init__(self, file: Path):
        from tokenizers import Tokenizer

        self.vocab_size = _size(file)  # which refuses what is no tokenizer
        try:
            self._library = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises this very class
            raise BadData(f"{file} is not a Hugging Face tokenizer: {str(error).splitlines()[0]}.") from error
        names = [_end_beside(file.parent), *ENDS]
        self.eod = next((found for name in names if name and (found := self.id_of(name)) is not None), None)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name."""
        return self._library.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._library.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[bytes]) -> list:
        """Token ids of each text, given in UTF-8, as arrays of integers."""
        import numpy as np

        dtype = dtype_of(self.vocab_size)
        found = self._library.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype) for encoding in found]

    def decode(self, ids) -> str:
        """Text of token ids; ids that it does not know are left out."""
        return self._library.decode([int(token) for token in ids if token >= 0], skip_special_tokens=False)


class SentencePiece:
    """A SentencePiece `.model`, without the tokens that begin and end a text; `eod` is its end-of-sentence token."""

    def __init__(self, file: Path):
        self._library = _processor(file)
        self.vocab_size = self._library.vocab_size()
        self.eod = self._library.eos_id() if self._library.eos_id() >= 0 else None

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name."""
        found = self._library.piece_to_id(token)
        return found if self._library.id_to_piece(found) == token else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._library.encode(text)

    def encode_batch(self, texts: list[bytes]) -> list:
        """Token ids of each text, given in UTF-8, as arrays of integers."""
        import numpy as np

        dtype = dtype_of(self.vocab_size)
        return [np.array(ids, dtype) for ids in self._library.encode([text.decode() for text in texts], num_threads=1)]

    def decode(self, ids) -> str:
        """Text of token ids; ids that it does not know are left out."""
        return self._library.decode([int(token) for token in ids if 0 <= token < self.vocab_size])


class Ids:
    """Stands in where nobody wrote down which tokenizer made the files of data=megatron: text shows as token ids."""

    eod = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Token ids written with blanks between them; raises BadData for any other text."""
        words = text.split()
        if not all(word.isdecimal() and int(word) < self.vocab_size for word in words):
            raise BadData(f"{text!r} has no token ids: nobody recorded the tokenizer of data.path, set data.tokenizer.")
        return [int(word) for word in words]

    def decode(self, ids) -> str:
        """The ids with blanks between them."""
        return " ".join(str(int(token)) for token in ids)


Tokenizer = Bytes | HuggingFace | SentencePiece | Ids


def tokenizer(cfg) -> Tokenizer:
    """The tokenizer of a configuration (conf.schema.Config): `vocab_size`, `eod`, `encode`, `decode`.

    That of data=megatron is recorded beside the files. Raises BadData for one that is not there or is damaged.
    """
    name, eod = tokenizer_name(cfg.data)
    if name is None:
        return Ids(cfg.model.vocab)
    held = open_tokenizer(name)
    held.eod = held.eod if eod is None else eod
    return held


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `name` means: bytes, a file, or a folder that holds one; raises BadData."""
    file = file_of(name)
    if file is None:
        return Bytes()
    return HuggingFace(file) if file.suffix == ".json" else SentencePiece(file)


def vocab_size(name: str) -> int:
    """Ids of the tokenizer that `name` means, read without loading it where that takes long; raises BadData."""
    file = file_of(name)
    return Bytes.vocab_size if file is None else _size(file)


def file_of(name: str) -> Path | None:
    """The file of a tokenizer, None for bytes; raises BadData when there is none."""
    if name == "bytes":
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        found = [path / file for file in FILES.values() if (path / file).is_file()]
        if not found:
            raise BadData(f"data.tokenizer={name} is a folder without {' or '.join(FILES.values())}.")
        return found[0]
    if not path.is_file():
        raise BadData(
            f"data.tokenizer={name} is not there: take bytes, or the path of a tokenizer.json or .model file."
        )
    if path.suffix not in FILES:
        raise BadData(f"data.tokenizer={name} is neither a tokenizer.json nor a SentencePiece .model file.")
    return path


def digest(name: str) -> str:
    """What tells one tokenizer from another: `bytes`, or the SHA-256 of its file; raises BadData."""
    file = file_of(name)
    if file is None:
        return "bytes"
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}.") from error


def dtype_of(size: int) -> str:
    """In which NumPy type `size` different ids are kept; the rule of Megatron's DType.optimal_dtype."""
    return "uint16" if size < 65500 else "int32"


def _size(file: Path) -> int:
    try:
        about = file.stat()
        return _size_read(file, about.st_mtime_ns, about.st_size)
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}.") from error


@lru_cache
def _size_read(file: Path, *_version) -> int:
    """One more than the largest id, as ids may have gaps."""
    if file.suffix == ".model":
        return _processor(file).vocab_size()
    try:
        content = json.loads(file.read_bytes())
        vocab = content["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        return 1 + max([*ids, *(token["id"] for token in content.get("added_tokens", []))])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadData(f"{file} is not a Hugging Face tokenizer: it has no vocabulary ({error!r}).") from error


def _processor(file: Path):
    from sentencepiece import SentencePieceProcessor

    try:
        held = SentencePieceProcessor(model_proto=file.read_bytes())
        if not held.vocab_size():  # so it is for an empty file
            raise RuntimeError("it has no vocabulary")
        return held
    except (RuntimeError, OSError) as error:
        raise BadData(f"{file} is not a SentencePiece model, or is damaged: {str(error).splitlines()[0]}.") from error


def _end_beside(folder: Path) -> str | None:
    """The `eos_token` of a tokenizer_config.json, which is a name or holds one."""
    file = folder / "tokenizer_config.json"
    if not os.path.exists(file):
        return None
    try:
        token = json.loads(file.read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise BadData(f"{file} cannot be read: {error}.") from error
    return token.get("content") if isinstance(token, dict) else token
