"""How text becomes token ids."""

import numpy as np

from data.corpus import BadData


class Bytes:
    """Every byte is a token: 256 ids, nothing to learn, nothing to download, any text in any encoding."""

    size = 256
    # Text has no zero bytes (data.corpus refuses them), so zero is free to stand between two documents.
    separator = 0

    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids, uint8 [bytes of text]."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)

    def decode(self, ids) -> str:
        """Text of token ids; bytes that are no UTF-8, and ids that are no bytes, show as the replacement character."""
        known = (int(token) if 0 <= token < self.size else 0xFF for token in ids)
        return bytes(known).decode("utf-8", errors="replace")


TOKENIZERS = {"bytes": Bytes}


def tokenizer(name: str) -> Bytes:
    """The tokenizer called `name`; raises BadData for a name that is not in TOKENIZERS."""
    if name not in TOKENIZERS:
        raise BadData(f"data.tokenizer={name} is unknown; there is {', '.join(TOKENIZERS)}.")
    return TOKENIZERS[name]()
