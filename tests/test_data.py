"""Data: what a run trains on, in which order, and what is said when the data cannot be used."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conf.schema import Config, Data, DataKind
from data.batches import Batches, Mock, Windows, load
from data.corpus import BadData
from data.order import Order

ROOT = Path(__file__).parent.parent


def configure(kind="text", path=None, seq_len=16, global_batch=8, micro_batch=2, val_share=0.1, vocab=256, seed=1):
    cfg = Config()
    cfg.data = Data(kind=DataKind(kind), path=path and str(path), tokenizer="bytes", val_share=val_share)
    cfg.train.seq_len, cfg.train.global_batch, cfg.train.micro_batch = seq_len, global_batch, micro_batch
    cfg.train.seed, cfg.model.vocab = seed, vocab
    return cfg


def write_files(folder: Path, count: int) -> Path:
    for i in range(count):
        (folder / f"file{i}.txt").write_text(f"<{i}>" + "words and lines\n" * 20)
    return folder


def held_out(cfg) -> set[bytes]:
    """The validation documents of a corpus."""
    return set(load(cfg).val.tokens.tobytes().split(b"\0")) - {b""}


def test_standard_library_is_text_enough_and_the_same_every_time():
    cfg = configure("stdlib", seq_len=256, val_share=0.05)
    corpus = load(cfg)
    assert len(corpus.train.tokens) > 5e6
    assert 0.01 < len(corpus.val.tokens) / len(corpus.train.tokens) < 0.15
    assert load(cfg).facts == corpus.facts
    assert "def " in corpus.tokenizer.decode(np.concatenate([corpus.train[i] for i in range(50)]))


def test_training_and_validation_share_no_document():
    corpus = load(configure("stdlib", seq_len=256))
    train, val = (set(part.tokens.tobytes().split(b"\0")) - {b""} for part in (corpus.train, corpus.val))
    assert len(train) > 300 and len(val) > 20
    assert not train & val


def test_adding_a_file_moves_no_other_file(tmp_path):
    cfg = configure(path=write_files(tmp_path, 60), val_share=0.2)
    before = held_out(cfg)
    (tmp_path / "another.txt").write_text("more text\n" * 30)
    assert len(before) > 3
    assert before == held_out(cfg) - {b"more text\n" * 30}


def test_two_files_give_one_to_validation(tmp_path):
    corpus = load(configure(path=write_files(tmp_path, 2), val_share=0.001))
    assert len(corpus.train.tokens) == len(corpus.val.tokens)


def test_one_file_holds_out_its_end_from_the_start_of_a_line(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i}\n" for i in range(1000)))
    corpus = load(configure(path=file))
    text = corpus.tokenizer.decode(corpus.train.tokens[:-1]) + corpus.tokenizer.decode(corpus.val.tokens[:-1])
    assert text == file.read_text()
    assert corpus.tokenizer.decode(corpus.val.tokens).startswith("line ")
    assert 0.08 < len(corpus.val.tokens) / len(text) < 0.12


def test_copies_of_a_file_count_once(tmp_path):
    text = "".join(f"line {i}\n" for i in range(1000))
    for name in "abcdefgh":
        (tmp_path / name).write_text(text)
    corpus = load(configure(path=tmp_path))
    assert len(corpus.train.tokens) + len(corpus.val.tokens) == len(text) + 2


def test_hidden_files_are_not_text(tmp_path):
    write_files(tmp_path, 5)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\0\1")
    load(configure(path=tmp_path))


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda p: None, "needs data.path"),
        (lambda p: p / "nowhere", "nowhere does not exist"),
        (lambda p: p, "is a folder without files"),
        (lambda p: (p / "a.txt", (p / "a.txt").write_text(""))[0], "the file is empty"),
        (lambda p: (p, (p / "a.txt").write_text(""), (p / "b.txt").write_text(""))[0], "all files are empty"),
        (lambda p: (p, (p / "a.bin").write_bytes(b"ab\0c"))[0], "a.bin is not a text file: byte 2 is zero"),
        (lambda p: (p / "a.txt", (p / "a.txt").write_text("short"))[0], "Too little text"),
        (lambda p: (p, (p / "a").write_text("x" * 999), (p / "b").write_text("y"))[0], "Too little text"),
    ],
)
def test_unusable_text_is_refused_in_a_sentence(tmp_path, make, sentence):
    with pytest.raises(BadData, match=sentence):
        load(configure(path=make(tmp_path)))


def test_tokens_the_model_does_not_know_are_refused():
    with pytest.raises(BadData, match="model.vocab=100; use model.vocab=256"):
        load(configure("stdlib", vocab=100))


def test_windows_overlap_by_the_target_only():
    windows = Windows(np.arange(33, dtype=np.uint8), 8)
    assert len(windows) == 4
    assert [list(w[[0, -1]]) for w in windows] == [[0, 8], [8, 16], [16, 24], [24, 32]]
    assert windows[0].dtype == np.int64
    with pytest.raises(IndexError):
        windows[4]


def test_an_epoch_sees_every_sample_once_and_the_next_in_another_order():
    order = Order(100, seed=5)
    first, second = ([order[i] for i in range(start, start + 100)] for start in (0, 100))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second and first != sorted(first)
    assert [Order(100, seed=6)[i] for i in range(100)] != first
    # Asked in any order, a position keeps its sample: this is what makes resuming exact.
    assert [order[i] for i in (150, 3, 199, 0)] == [second[50], first[3], second[99], first[0]]


def test_order_is_the_same_on_every_machine_and_in_every_version():
    order = Order(1000, seed=1234)
    assert [order[i] for i in (0, 1, 2, 999, 1000, 123456)] == [172, 25, 647, 98, 411, 355]


def test_samples_of_a_step_do_not_depend_on_the_layout():
    cfg = configure("stdlib", global_batch=12)
    samples = load(cfg).train

    def seen(dp: int, micro_batch: int) -> list[np.ndarray]:
        cfg.train.micro_batch = micro_batch
        ranks = [Batches(samples, cfg.train, rank, dp, seed=3) for rank in range(dp)]
        result = [np.concatenate([m for rank in ranks for m in rank.step(step)]) for step in (0, 1, 2, 7)]
        for rank in ranks:
            rank.close()
        return result

    reference = seen(dp=1, micro_batch=12)
    assert reference[0].shape == (12, 17)
    for dp, micro_batch in ((1, 1), (2, 3), (3, 2), (4, 1), (12, 1)):
        np.testing.assert_equal(seen(dp, micro_batch), reference)


def test_validation_goes_in_order_and_starts_again():
    cfg = configure(global_batch=4, micro_batch=4)
    batches = Batches(Windows(np.arange(97, dtype=np.uint8), 16), cfg.train, 0, 1, seed=None)
    assert [w[0] // 16 for step in (0, 1) for w in batches.step(step)[0]] == [0, 1, 2, 3, 4, 5, 0, 1]
    np.testing.assert_equal(batches.step(0), batches.step(0))
    batches.close()


def test_an_error_while_reading_ahead_reaches_the_training_loop():
    class Broken(Windows):
        def __getitem__(self, index):
            raise OSError("disk gone")

    batches = Batches(Broken(np.zeros(999, np.uint8), 16), configure().train, 0, 1, seed=1)
    with pytest.raises(OSError, match="disk gone"):
        batches.step(0)
    batches.close()


def test_mock_tokens_fit_any_vocabulary_and_repeat():
    corpus = load(configure("mock", vocab=50257, seq_len=64))
    assert corpus.train[3].shape == (65,) and corpus.train[3].max() < 50257 and corpus.train[3].max() > 256
    np.testing.assert_equal(corpus.train[3], Mock(50257, 64, stream=0)[3])
    assert (corpus.train[3] != corpus.val[3]).any() and (corpus.train[3] != corpus.train[4]).any()


def test_data_does_not_need_torch():
    code = "import sys, data.batches; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
