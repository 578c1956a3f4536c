"""data.prepare: text of every form to token files that Megatron-core and data=megatron read, whole or not at all."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import tokenizers_made as made
from backports import zstd

from data import bpe, texts
from data.batches import load
from data.corpus import BadData
from data.pair import Pair
from data.prepare import options, prepare
from data.tokenizer import Bytes, open_tokenizer
from parallel import compose, rules

ROOT = Path(__file__).parent.parent
TEXTS = [f"Document {number}: naïve 字 🎉\n\n  x = {'y' * (number % 7)}\n" for number in range(50)]


def jsonl(documents, key="text") -> bytes:
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in documents).encode()


def read(prefix) -> tuple[list[list[int]], np.dtype]:
    """Every document by Megatron-core's own reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    held = IndexedDataset(str(prefix))
    ends = held.document_indices
    found = [np.concatenate([held[i] for i in range(a, b)]).tolist() for a, b in zip(ends[:-1], ends[1:], strict=True)]
    return found, np.dtype(held.index.dtype)


def make(tmp_path, name, content: bytes, tokenizer="bytes", **words) -> dict:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content)
    words = {"input": tmp_path / name, "tokenizer": tokenizer, "output": tmp_path / "out", "workers": 1} | words
    return prepare(options([f"{key}={value}" for key, value in words.items()]))


FORMS = {
    "texts.jsonl": jsonl,
    "texts.jsonl.gz": lambda documents: gzip.compress(jsonl(documents)),
    "texts.jsonl.zst": lambda documents: zstd.compress(jsonl(documents[:20])) + zstd.compress(jsonl(documents[20:])),
    "texts.txt": lambda documents: "".join(documents).encode(),
    "texts.txt.gz": lambda documents: gzip.compress("".join(documents).encode()),
}


@pytest.mark.parametrize("name", FORMS)
def test_megatron_reads_the_documents_of_every_form(name, tmp_path):
    record = make(tmp_path, name, FORMS[name](TEXTS))
    documents = TEXTS if "jsonl" in name else ["".join(TEXTS)]
    found, dtype = read(tmp_path / "out")
    assert [Bytes().decode(ids[:-1]) for ids in found] == documents
    assert {ids[-1] for ids in found} == {0} and dtype == np.uint16
    assert (record["documents"], record["tokens"]) == (len(documents), sum(map(len, found)))
    assert record["text_bytes"] == len("".join(TEXTS).encode())
    assert json.loads((tmp_path / "out.json").read_bytes())["tokenizer"] == "bytes"


def test_files_of_a_folder_come_in_order_and_are_documents(tmp_path):
    for number, text in enumerate(TEXTS):
        file = tmp_path / "in" / f"{number:02}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    (tmp_path / "in" / ".hidden").write_bytes(b"\0")
    make(tmp_path, "in/zz.jsonl", jsonl(["last"]), input=tmp_path / "in", workers=2)
    assert [Bytes().decode(ids[:-1]) for ids in read(tmp_path / "out")[0]] == [*TEXTS, "last"]
    assert len(texts.find(str(tmp_path / "in" / "1*.txt"))) == 10


@pytest.mark.parametrize("kind", [made.hugging_face, made.sentence_piece])
def test_what_was_prepared_is_trained_on_without_naming_the_tokenizer(kind, tmp_path):
    file = kind(tmp_path / "tokenizer")
    record = make(tmp_path, "texts.jsonl", jsonl(TEXTS * 4), tokenizer=file)
    held = open_tokenizer(str(file))
    found, _ = read(tmp_path / "out")
    assert found == [[*held.encode(text), held.eod] for text in TEXTS * 4]
    file.unlink()  # a copy lies beside the tokens
    words = ["data=megatron", f"data.path={tmp_path}/out", "model.vocab=400", "train.seq_len=16", "launch.device=cpu"]
    cfg = compose.compose(words)[0]
    assert rules.problems(cfg, gpus=0) == []
    corpus = load(cfg)
    assert (corpus.tokenizer.vocab_size, corpus.tokenizer.eod) == (record["vocab_size"], held.eod)
    assert "Document" in corpus.tokenizer.decode(np.concatenate([window[:-1] for window in corpus.train]))
    cfg.model.vocab = 128
    assert f"take model.vocab={record['vocab_size']}." in " ".join(rules.problems(cfg, gpus=0))


def test_bpe_learns_from_the_text_and_gives_it_back(tmp_path):
    record = make(tmp_path, "texts.jsonl.gz", gzip.compress(jsonl(TEXTS * 20)), tokenizer="bpe", vocab=300)
    held = open_tokenizer(f"{tmp_path}/out.tokenizer.json")
    found, _ = read(tmp_path / "out")
    assert record["vocab_size"] == held.vocab_size == 300 and record["tokenizer"] == "out.tokenizer.json"
    assert [held.decode(ids[:-1]) for ids in found] == TEXTS * 20
    assert sum(map(len, found)) < 0.7 * record["text_bytes"]
    strange = bytes(range(1, 128)).decode() + "αβγ 日本"
    assert held.decode(held.encode(strange)) == strange


def test_the_end_of_a_document_can_be_chosen(tmp_path):
    file = made.hugging_face(tmp_path / "tokenizer")
    make(tmp_path, "a.jsonl", jsonl(TEXTS), tokenizer=file, eod="none", output=tmp_path / "none")
    assert all(ids[-1] != 0 for ids in read(tmp_path / "none")[0])
    make(tmp_path, "a.jsonl", jsonl(TEXTS), tokenizer=file, eod="A", output=tmp_path / "a")
    assert {ids[-1] for ids in read(tmp_path / "a")[0]} == {open_tokenizer(str(file)).id_of("A")}
    with pytest.raises(BadData, match="eod=nope is not a token"):
        make(tmp_path, "a.jsonl", jsonl(TEXTS), tokenizer=file, eod="nope", output=tmp_path / "b")


def test_empty_documents_are_named_or_left_out(tmp_path):
    content = jsonl([TEXTS[0], "", TEXTS[1]]) + b"\n  \n"
    with pytest.raises(BadData, match="a.jsonl, line 2: the document is empty; empty=skip"):
        make(tmp_path, "a.jsonl", content)
    assert make(tmp_path, "a.jsonl", content, empty="skip")["documents"] == 2
    with pytest.raises(BadData, match="has no text"):
        make(tmp_path, "b.jsonl", b"\n", output=tmp_path / "b")


def parts_of(content: bytes, monkeypatch, tmp_path, size=4096) -> list[texts.Part]:
    monkeypatch.setattr(texts, "PART", size)
    (tmp_path / "long.txt").write_bytes(content)
    return list(texts.parts(tmp_path / "long.txt", jsonl=False))


def test_a_long_text_becomes_the_same_tokens_in_parts_as_whole(tmp_path, monkeypatch):
    random.seed(1)
    words = ["fox", "naïve", "字", "🎉", "x=1", ".", "\n", "\n\n", "\n    ", " ", "  ", "\t"]
    content = "".join(random.choice(words) for _ in range(40_000)).encode()
    parts = parts_of(content, monkeypatch, tmp_path)
    assert len(parts) > 20 and [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert b"".join(part.data for part in parts) == content
    assert [part.place for part in parts[1:]] == np.cumsum([len(part.data) for part in parts])[:-1].tolist()
    held = open_tokenizer(str(made.hugging_face(tmp_path)))
    ids = held.encode_batch([part.data for part in parts])
    assert np.concatenate(ids).tolist() == held.encode(content.decode())


@pytest.mark.parametrize("text", ["字" * 9000, "a" * 9000, "🎉\n" * 5000, "\n" * 9000])
def test_no_character_is_cut(text, tmp_path, monkeypatch):
    parts = parts_of(text.encode(), monkeypatch, tmp_path)
    assert len(parts) > 1 and "".join(part.data.decode() for part in parts) == text


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl, line 2 is not JSON in UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n\n{"body": "a"}\n', 'a.jsonl, line 3: there is no text under "text"'),
        ("a.jsonl", b'["text"]\n', 'line 1: there is no text under "text"'),
        ("a.jsonl", b'{"text": 3}\n', 'line 1: there is no text under "text"'),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1 is not JSON in UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1 is not JSON in UTF-8"),
        ("a.txt", b"good\nb\xe4d\n", "a.txt is not UTF-8 at byte 6"),
        ("a.txt", b"good\n\0", "a.txt is not a text file: byte 5 is zero"),
        ("a.txt", b"", "a.txt is empty; empty=skip"),
        ("a.txt.gz", b"no gzip at all", "a.txt.gz cannot be read"),
        ("a.txt.gz", gzip.compress(b"words " * 9999)[:-20], "a.txt.gz is truncated"),
        ("a.jsonl.zst", b"no zstd at all", "a.jsonl.zst cannot be read"),
        ("a.jsonl.zst", zstd.compress(jsonl(TEXTS * 9))[:-9], "a.jsonl.zst is truncated"),
    ],
)
def test_text_that_is_none_is_named(name, content, sentence, tmp_path):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(BadData, match=sentence):
        for part in texts.parts(file, texts.is_jsonl(file, "auto")):
            texts.documents(part, "text", skip_empty=False, utf8=True)


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["inputs=a"], "inputs=a is no option, did you mean input=?"),
        (["input"], "input is no option"),
        (["input=a", "output=b"], "tokenizer= is missing"),
        (["workers=0"], "workers is a whole number above 0"),
        (["format=xml"], "format is auto, text or jsonl"),
    ],
)
def test_a_command_line_that_means_nothing_is_refused(words, sentence):
    with pytest.raises(BadData, match=sentence.replace("?", r"\?")):
        options(words)


def test_a_failure_leaves_nothing_and_nothing_is_replaced_by_accident(tmp_path):
    with pytest.raises(BadData, match="line 51 is not JSON"):
        make(tmp_path, "a.jsonl", jsonl(TEXTS) + b"{")
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
    with pytest.raises(BadData, match="nowhere is no file"):
        make(tmp_path, "a.jsonl", b"", input=tmp_path / "nowhere")
    with pytest.raises(BadData, match="vocab=100 is too small"):
        bpe.train([], 100, tmp_path / "b")
    (tmp_path / "out.json").write_text("mine")
    with pytest.raises(BadData, match="out.json is there already"):
        make(tmp_path, "a.jsonl", jsonl(TEXTS))
    assert (tmp_path / "out.json").read_text() == "mine"
    make(tmp_path, "a.jsonl", jsonl(TEXTS), overwrite="true")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "out.bin", "out.idx", "out.json"]


def test_two_cannot_write_the_same_files(tmp_path):
    with Pair(str(tmp_path / "out"), False):
        with pytest.raises(BadData, match="is being written by another process"), Pair(str(tmp_path / "out"), False):
            pass
        assert (tmp_path / "out.unfinished").exists()
    assert list(tmp_path.iterdir()) == []


PUBLISH = """
import os, sys
from data.pair import Pair
prefix, steps = sys.argv[1], int(sys.argv[2])
def count(call):
    def counted(*args, **kwargs):
        global steps
        steps -= 1
        if steps < 0:
            os._exit(9)
        return call(*args, **kwargs)
    return counted
with Pair(prefix, True) as pair:
    for end in (".bin", ".idx", ".tokenizer.json"):
        pair.path(end).write_text("new")
    for name in ("open", "fsync", "replace", "unlink", "close"):
        setattr(os, name, count(getattr(os, name)))
    pair.publish({"new": True})
os._exit(0)
"""


@pytest.mark.parametrize("old", [False, True])
def test_an_end_at_any_moment_leaves_no_index_without_its_tokens(old, tmp_path):
    for steps in range(40):
        prefix = tmp_path / str(steps)
        if old:
            for end in (".bin", ".idx", ".json", ".tokenizer.json"):
                Path(f"{prefix}{end}").write_text("old")
        code = subprocess.run([sys.executable, "-c", PUBLISH, str(prefix), str(steps)], cwd=ROOT).returncode
        there = {end: Path(f"{prefix}{end}") for end in (".bin", ".tokenizer.json", ".json", ".idx")}
        if there[".idx"].exists():
            ages = {"old" if file.read_text() == "old" else "new" for file in there.values()}
            assert len(ages) == 1, steps
        if code == 0:
            assert steps > 10 and there[".idx"].read_text() == "new"
            return
    pytest.fail("never came to its end")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [made.hugging_face, made.sentence_piece])
def test_a_mixture_of_prepared_files_is_trained_on_and_sampled_in_words(kind, tmp_path, train):
    file = kind(tmp_path / "tokenizer")
    for name in "ab":
        make(tmp_path, f"{name}.jsonl", jsonl(TEXTS * 4), tokenizer=file, output=tmp_path / name)
    words = "model.vocab=512 train.steps=3 train.seq_len=32 train.global_batch=4 train.sample_length=6 model.layers=2"
    words += " data=megatron data.path=[0.3,a,0.7,b] data.sample_prompt=fox parallel=tp2 tracking.mode=disabled"
    done = train(*words.split(), "hydra.run.dir=run", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert result["status"] == "ok" and result["data"]["source"] == "30.0% a + 70.0% b"
    assert [found["prefix"] for found in result["data"]["files"]] == ["a", "b"]
    assert len(result["data"]["files"][0]["idx_sha256"]) == 64
    assert result["sample"]["prompt"] == "fox" and result["sample"]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_preparation_leaves_no_files_and_no_process(signum, tmp_path, plain_env):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["word " * 400] * 20_000))
    words = [f"input={tmp_path}/a.jsonl", f"tokenizer={made.hugging_face(tmp_path)}", f"output={tmp_path}/out"]
    command = [sys.executable, "-m", "data.prepare", *words, "workers=2"]
    running = subprocess.Popen(command, cwd=ROOT, env=plain_env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    growing = tmp_path / "out.unfinished" / "tokens.bin"
    while not (growing.exists() and growing.stat().st_size > 100_000):
        assert running.poll() is None
        time.sleep(0.02)
    children = psutil.Process(running.pid).children(recursive=True)
    assert len(children) >= 2
    os.kill(running.pid, signum)
    code, said = running.wait(timeout=60), running.stderr.read()
    assert code == (-signal.SIGKILL if signum == signal.SIGKILL else 128 + signum), said
    assert not [file for file in tmp_path.iterdir() if file.name.startswith("out.") and file.is_file()]
    assert (tmp_path / "out.unfinished").exists() == (signum == signal.SIGKILL)
    assert not psutil.wait_procs(children, timeout=20)[1]
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    assert subprocess.run(command, cwd=ROOT, env=plain_env, capture_output=True).returncode == 0
    assert len(read(tmp_path / "out")[0]) == 50 and not (tmp_path / "out.unfinished").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path, plain_env):
    """Peak resident memory of the parent, in MiB, for 21 MB of text and for five times as much."""
    code = "import resource, sys; from data.prepare import main; assert main(sys.argv[1:]) == 0\n"
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    line = jsonl(["some words of a text \n" * 500])
    peaks = []
    for copies in (2_000, 10_000):
        (tmp_path / f"{copies}.jsonl").write_bytes(line * copies)
        words = [f"input={tmp_path}/{copies}.jsonl", "tokenizer=bytes", f"output={tmp_path}/{copies}"]
        done = subprocess.run(
            [sys.executable, "-c", f"if __name__ == '__main__':\n {code.replace(chr(10), chr(10) + ' ')}", *words],
            cwd=ROOT, env=plain_env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert peaks[1] < peaks[0] + 60, peaks
