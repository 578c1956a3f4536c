"""Tokenizers: bytes, Hugging Face and SentencePiece files, and what is said about files that are none."""

import json

import numpy as np
import pytest
import tokenizers_made as made

from conf.schema import Config, Data, DataKind
from data import batches, tokenizer
from data.corpus import BadData
from data.tokenizer import Bytes, open_tokenizer
from parallel import rules

SENTENCE = "A naïve fox: 字 🎉\n\n    x = 1\n"
KINDS = {"bytes": lambda folder: "bytes", "hugging face": made.hugging_face, "sentencepiece": made.sentence_piece}


@pytest.fixture(params=KINDS)
def name(request, tmp_path):
    return str(KINDS[request.param](tmp_path))


def text_config(path, name, vocab=512, seq_len=16):
    cfg = Config()
    cfg.data = Data(kind=DataKind.text, path=str(path), tokenizer=name, val_share=0.2)
    cfg.train.seq_len, cfg.train.global_batch, cfg.train.micro_batch, cfg.model.vocab = seq_len, 2, 1, vocab
    return cfg


def test_text_survives(name):
    held = open_tokenizer(name)
    ids = held.encode(SENTENCE)
    assert held.decode(ids) == SENTENCE
    assert all(isinstance(token, int) and 0 <= token < held.vocab_size for token in ids)
    (batch,) = held.encode_batch([SENTENCE.encode()])
    assert batch.tolist() == ids


def test_a_model_may_draw_ids_that_the_tokenizer_does_not_know():
    assert Bytes().decode([72, 105, 300, -1, 33]) == "Hi��!"


@pytest.mark.parametrize("make", [made.hugging_face, made.sentence_piece])
def test_padding_ids_are_left_out_of_text(make, tmp_path):
    held = open_tokenizer(str(make(tmp_path)))
    assert held.decode([*held.encode("fox"), 511, -1]) == "fox"


def test_the_size_is_known_without_the_library(name):
    assert tokenizer.vocab_size(name) == open_tokenizer(name).vocab_size


def test_the_size_counts_added_tokens_and_gaps(tmp_path):
    file = made.with_added_token(made.hugging_face(tmp_path), "<|user|>", 407)
    assert tokenizer.vocab_size(str(file)) == open_tokenizer(str(file)).vocab_size == 408


def test_a_folder_of_a_model_is_a_tokenizer_too(tmp_path):
    made.hugging_face(tmp_path / "a")
    made.sentence_piece(tmp_path / "b")
    assert [open_tokenizer(str(tmp_path / name)).vocab_size for name in "ab"] == [300, 330]


def test_the_end_of_a_document_is_the_one_that_the_tokenizer_has(tmp_path):
    assert open_tokenizer(str(made.hugging_face(tmp_path / "a"))).eod == 0
    assert open_tokenizer(str(made.hugging_face(tmp_path / "b", end="</doc>"))).eod is None
    (tmp_path / "b" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</doc>"}}))
    assert open_tokenizer(str(tmp_path / "b")).eod == 0
    assert open_tokenizer(str(made.sentence_piece(tmp_path / "c"))).eod == 2


def test_text_is_trained_on_with_any_tokenizer(name, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(6):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} " + SENTENCE * 20)
    corpus = batches.load(text_config(tmp_path / "texts", name))
    held = open_tokenizer(name)
    whole = np.concatenate([corpus.train.tokens, corpus.val.tokens])
    assert (whole == held.eod).sum() == 6 and whole[-1] == held.eod
    documents = held.decode(corpus.train.tokens[corpus.train.tokens != held.eod])
    assert documents.count("naïve fox: 字 🎉") >= 80


def test_a_model_that_knows_too_few_ids_is_refused_with_the_number_to_set(name, tmp_path, cfg_of):
    (tmp_path / "text.txt").write_text("words\n" * 999)
    size = tokenizer.vocab_size(name)
    cfg = cfg_of("data=text", f"data.path={tmp_path}/text.txt", "model.vocab=512")
    cfg.data.tokenizer, cfg.model.vocab = name, size - 1
    (sentence,) = rules.problems(cfg, gpus=0)
    assert f"model.vocab={size - 1}" in sentence and f"take model.vocab={size}." in sentence
    cfg.model.vocab = size
    assert rules.problems(cfg, gpus=0) == []


@pytest.mark.parametrize(
    "file, content, sentence",
    [
        ("nowhere.json", None, "nowhere.json is not there"),
        ("words.txt", b"a b c", "neither a tokenizer.json nor a SentencePiece .model"),
        ("tokenizer.json", b"", "tokenizer.json is not a Hugging Face tokenizer"),
        ("tokenizer.json", b"[1, 2]", "it has no vocabulary"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0}}}', "tokenizer.json is not a Hugging Face tokenizer"),
        ("tokenizer.model", b"", "tokenizer.model is not a SentencePiece model"),
        ("tokenizer.model", b"garbage" * 40, "tokenizer.model is not a SentencePiece model"),
        ("empty", None, "is a folder without tokenizer.json or tokenizer.model"),
    ],
)
def test_what_is_no_tokenizer_is_named(file, content, sentence, tmp_path):
    (tmp_path / "empty").mkdir()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(BadData, match=sentence):
        open_tokenizer(str(tmp_path / file))


def test_a_truncated_tokenizer_is_named(tmp_path):
    for file in (made.hugging_face(tmp_path), made.sentence_piece(tmp_path)):
        file.write_bytes(file.read_bytes()[:1500])
        with pytest.raises(BadData, match=f"{file.name} is not a"):
            open_tokenizer(str(file))


def test_text_that_is_not_utf8_is_named_for_a_tokenizer_that_needs_it(tmp_path):
    (tmp_path / "latin.txt").write_bytes("naïve\n".encode("latin-1") * 99)
    batches.load(text_config(tmp_path / "latin.txt", "bytes"))
    with pytest.raises(BadData, match="latin.txt is not UTF-8 at byte 2: take data.tokenizer=bytes"):
        batches.load(text_config(tmp_path / "latin.txt", str(made.hugging_face(tmp_path / "hf"))))
