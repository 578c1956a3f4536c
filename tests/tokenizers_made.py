"""Small tokenizers of the kinds that people bring, trained on the spot by the libraries they belong to."""

import io
import json
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = ["The quick brown fox jumps over the lazy dog; naïve 字 🎉.", "def f(x):\n    return x + 1\n"] * 40


def hugging_face(folder: Path, size: int = 300, end: str = "<|endoftext|>") -> Path:
    """A byte-level BPE in folder/tokenizer.json."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def sentence_piece(folder: Path, size: int = 330) -> Path:
    """A BPE with byte fallback in folder/tokenizer.model, as Llama 2 has one."""
    held = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=held, vocab_size=size, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(held.getvalue())
    return folder / "tokenizer.model"


def with_added_token(file: Path, token: str, number: int) -> Path:
    """The same tokenizer.json with one more token, of an id beyond a gap."""
    content = json.loads(file.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": number, "content": token})
    file.write_text(json.dumps(content))
    return file
