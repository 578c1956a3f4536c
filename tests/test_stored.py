"""data=megatron: files of Megatron-core's own builder, what is trained on and held out, mixtures, and damage."""

import json
import re
import struct
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import tokenizers_made as made
from omegaconf import OmegaConf

from data.batches import Batches, load
from data.corpus import BadData
from data.indexed import HEADER, open_index
from data.order import BlendedOrder, Order
from data.padding import PADDING
from data.sources import sources
from parallel import compose, rules

ROOT = Path(__file__).parent.parent


def build(prefix: Path, documents, dtype=np.int32) -> str:
    """Files as Megatron-LM's own tool leaves them: nothing but .bin and .idx."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        sequences = document if isinstance(document, list) else [document]
        builder.add_document(np.concatenate(sequences), [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def numbered(count: int, first: int = 0, seed: int = 0) -> list[np.ndarray]:
    """Documents of 5 to 60 tokens, each of its own number only."""
    lengths = np.random.default_rng(seed).integers(5, 60, count)
    return [np.full(length, number) for number, length in enumerate(lengths, first)]


@pytest.fixture(scope="module")
def composed():
    words = ["data=text", f"data.path={ROOT}", "train.sample_length=0", "model.vocab=5000", "launch.device=cpu"]
    return OmegaConf.to_object(compose.check(compose.compose(words)[0]))


@pytest.fixture
def configure(composed):
    def config(path, **train):
        cfg = deepcopy(composed)
        cfg.data.kind, cfg.data.path, cfg.data.tokenizer = type(cfg.data.kind)("megatron"), path, None
        cfg.train.seq_len, cfg.train.global_batch, cfg.train.micro_batch = 16, 8, 2
        for name, value in train.items():
            setattr(cfg.train, name, value)
        return cfg

    return config


def tokens(samples) -> np.ndarray:
    """The stream that windows were cut from, as far as they reach."""
    stream = np.concatenate([window[:-1] for window in samples])
    return stream[stream != PADDING]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_every_document_of_megatrons_builder_is_trained_on_or_held_out_once_and_in_order(dtype, tmp_path, configure):
    documents = numbered(400)
    corpus = load(configure(build(tmp_path / "a", documents, dtype)))
    train, val = tokens(corpus.train), tokens(corpus.val)
    assert not set(train.tolist()) & set(val.tolist())
    held = sorted(set(val.tolist()))
    assert 5 < len(held) < 50
    everything = np.concatenate(documents)
    assert train.tolist() == everything[~np.isin(everything, held)][: len(train)].tolist()
    assert val.tolist() == everything[np.isin(everything, held)][: len(val)].tolist()
    assert len(val) >= corpus.facts["val_tokens"] - 1, "held-out text is counted to its last token"
    assert corpus.facts["tokens"] + corpus.facts["val_tokens"] == len(everything)
    assert corpus.train[0].dtype == np.int64 and corpus.train[0].shape == (17,)
    assert corpus.train[0][-1] == corpus.train[1][0]


def test_documents_of_several_sequences_stay_together(tmp_path, configure):
    documents = [[part[:3], part[3:]] for part in numbered(300)]
    corpus = load(configure(build(tmp_path / "a", documents)))
    assert corpus.facts["files"][0]["documents"] == 300
    assert not set(tokens(corpus.train).tolist()) & set(tokens(corpus.val).tolist())


def test_appended_documents_move_no_other_between_training_and_validation(tmp_path, configure):
    before = load(configure(build(tmp_path / "a", numbered(200))))
    after = load(configure(build(tmp_path / "b", numbered(300))))
    held = set(tokens(before.val).tolist())
    assert held <= set(tokens(after.val).tolist())
    assert held == {number for number in tokens(after.val).tolist() if number < max(held) + 1}


def test_a_single_document_holds_out_its_end(tmp_path, configure):
    corpus = load(configure(build(tmp_path / "a", [np.arange(1000)])))
    assert (corpus.facts["tokens"], corpus.facts["val_tokens"]) == (950, 50)
    assert corpus.train[0][0] == 0 and corpus.val[0][0] == 950


def test_two_documents_give_one_to_validation(tmp_path, configure):
    corpus = load(configure(build(tmp_path / "a", [np.full(300, 1), np.full(300, 2)])))
    assert corpus.facts["tokens"] == corpus.facts["val_tokens"] == 300


def seen(cfg, dp: int, micro_batch: int, steps) -> list[np.ndarray]:
    """What all data-parallel ranks together read in these steps, in the order of the global batch."""
    cfg.train.micro_batch = micro_batch
    corpus = load(cfg)
    ranks = [Batches(corpus.train, cfg.train, rank, dp, cfg.train.seed) for rank in range(dp)]
    found = [np.concatenate([part for rank in ranks for part in rank.step(step)]) for step in steps]
    for rank in ranks:
        rank.close()
    return found


@pytest.mark.parametrize("blend", [False, True])
def test_samples_depend_on_seed_and_position_only(blend, tmp_path, configure):
    path = build(tmp_path / "a", numbered(400))
    if blend:
        path = [0.3, path, 0.7, build(tmp_path / "b", numbered(300, first=1000, seed=1))]
    first = seen(configure(path, steps=10), 1, 8, range(10))
    # Another number of steps, other ranks and micro-batches, and starting in the middle, as after a resume.
    for dp, micro_batch, steps in ((1, 1, 1000), (2, 2, 10), (4, 1, 77), (8, 1, 10)):
        np.testing.assert_equal(seen(configure(path, steps=steps), dp, micro_batch, range(10)), first)
    np.testing.assert_equal(seen(configure(path), 2, 4, range(7, 10)), first[7:])
    # A batch of another size cuts the same order differently.
    larger = np.concatenate(seen(configure(path, global_batch=20), 1, 4, range(4)))
    np.testing.assert_equal(larger, np.concatenate(first))
    assert (seen(configure(path, seed=5), 1, 8, [0])[0] != first[0]).any()


def test_a_mixture_has_its_proportions_from_the_start_and_over_any_stretch():
    order = BlendedOrder([100, 1000, 37], [0.2, 0.7, 0.1], seed=3)
    sets = np.array([order[i][0] for i in range(20_000)])
    for stretch in (sets[:100], sets[:20_000], sets[7_000:9_000]):
        share = np.bincount(stretch, minlength=3) / len(stretch)
        np.testing.assert_allclose(share, [0.2, 0.7, 0.1], atol=1.5 / len(stretch) ** 0.99)


def test_a_mixture_goes_through_each_set_in_that_sets_own_order():
    order, counts = BlendedOrder([100, 1000], [1, 3], seed=3), [100, 1000]
    places = [order[i] for i in range(1200)]
    for chosen, count in enumerate(counts):
        own = Order(count, 3)
        numbers = [number for part, number in places if part == chosen]
        assert numbers == [own[i] for i in range(len(numbers))]
    assert len([1 for part, _ in places if part == 0]) == 300  # three epochs of the small one


def test_the_order_of_a_mixture_goes_on_beyond_its_period():
    order, period = BlendedOrder([1000, 1000], [0.3, 0.7], seed=1), BlendedOrder.PERIOD
    positions = [*range(period - 500, period + 500), 5 * period + 3]
    places = [order[i] for i in positions]
    assert [order[i] for i in reversed(positions)] == places[::-1]
    own = [Order(1000, 1), Order(1000, 1)]
    taken = [round(0.3 * period), period - round(0.3 * period)]
    for chosen in (0, 1):
        numbers = [number for part, number in places[500:1000] if part == chosen]
        assert numbers == [own[chosen][taken[chosen] + i] for i in range(len(numbers))]


def test_a_mixture_without_weights_takes_each_by_its_size(tmp_path, configure):
    small, large = build(tmp_path / "a", numbered(100)), build(tmp_path / "b", numbered(900, first=1000, seed=1))
    corpus = load(configure([small, large]))
    share = corpus.train.weights[0] / sum(corpus.train.weights)
    assert abs(share - corpus.train.sets[0].tokens / corpus.facts["tokens"]) < 1e-9 and 0.05 < share < 0.2


def test_validation_of_a_mixture_has_every_held_out_window_once(tmp_path, configure):
    paths = [build(tmp_path / "a", numbered(100)), build(tmp_path / "b", numbered(900, first=1000, seed=1))]
    mixed = load(configure([0.9, paths[0], 0.1, paths[1]])).val
    alone = [load(configure(path)).val for path in paths]
    assert sorted(w.tolist() for w in mixed) == sorted(w.tolist() for samples in alone for w in samples)
    first = [w for w in [mixed[i] for i in range(len(mixed) // 2)] if w[0] < 1000]
    assert abs(len(first) - len(alone[0]) / 2) <= 1  # half of the windows hold half of each set's


def test_what_went_in_is_on_record(tmp_path, configure):
    one, same = build(tmp_path / "a", numbered(300)), build(tmp_path / "c", numbered(300))
    facts = load(configure(one)).facts
    assert facts["files"][0] | {"idx_sha256": 0} == {
        "prefix": one, "documents": 300, "tokens": len(np.concatenate(numbered(300))), "dtype": "int32",
        "idx_sha256": 0,
    }  # fmt: skip
    assert load(configure(same)).facts["fingerprint"] == facts["fingerprint"]
    other = [document + 1 for document in numbered(300)]  # of the same lengths
    assert load(configure(build(tmp_path / "d", other))).facts["fingerprint"] != facts["fingerprint"]


def damage(prefix, where, change):
    file = Path(f"{prefix}{where}")
    file.write_bytes(change(file.read_bytes()))


def put(place: int, value: bytes):
    return lambda content: content[:place] + value + content[place + len(value) :]


LENGTHS = HEADER.size  # 300 documents of one sequence each
OFFSETS, FIRSTS = LENGTHS + 4 * 300, LENGTHS + 12 * 300
DAMAGE = {
    "empty index": (".idx", lambda content: b"", "a.idx is truncated: 0 bytes are less than the 34"),
    "index cut in its header": (".idx", lambda content: content[:20], "a.idx is truncated: 20 bytes"),
    "index cut": (".idx", lambda content: content[:-100], "a.idx is truncated: 300 sequences in 300 documents"),
    "index too long": (".idx", lambda content: content + b"12345678", "a.idx is damaged: 300 sequences"),
    "foreign file": (".idx", lambda content: b"PK\3\4" + content, "a.idx is not an index of Megatron's: it begins"),
    "header flipped": (".idx", put(3, b"\xff"), "a.idx is not an index of Megatron's"),
    "version": (".idx", put(9, b"\2"), "a.idx is damaged or of another version: version 2"),
    "no such type": (".idx", put(17, b"\x09"), "type 9 of tokens"),
    "tokens that are fractions": (".idx", put(17, b"\x07"), "type 7 of tokens"),
    "another type": (".idx", put(17, b"\x08"), "a.idx is damaged: sequence 1 does not begin"),
    "number of sequences": (".idx", put(25, b"\x10"), "a.idx is truncated"),
    "a length": (".idx", put(LENGTHS + 40, struct.pack("<i", 7777)), "sequence 11 does not begin where"),
    "a length below zero": (".idx", put(LENGTHS + 40, struct.pack("<i", -3)), "sequence 10 does not begin where"),
    "an offset": (".idx", put(OFFSETS + 80, struct.pack("<q", 12)), "sequence 10 does not begin where"),
    "the last length": (".idx", put(OFFSETS - 4, struct.pack("<i", 7777)), "a.bin is truncated: its index has"),
    "a document's start": (".idx", put(FIRSTS + 80, struct.pack("<q", 250)), "documents do not cover its 300"),
    "the last document's end": (".idx", put(FIRSTS + 2400, struct.pack("<q", 299)), "do not cover its 300"),
    "an empty document": (".idx", put(FIRSTS + 80, struct.pack("<q", 9)), "a.idx: document 9 is empty"),
    "tokens cut": (".bin", lambda content: content[:-5], "a.bin is truncated: its index has"),
    "tokens missing": (".bin", lambda content: b"", "a.bin is truncated"),
    "tokens of another file": (".bin", lambda content: content + b"1234", "a.bin is another file's"),
    "a token id": (".bin", put(400, struct.pack("<i", 5000)), r"a.bin has token id 5000 in document \d+ \(token 100\)"),
    "a token id below zero": (".bin", put(400, struct.pack("<i", -5)), "token id -5 .* ids below 0 are damage"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    prefix = build(tmp_path_factory.mktemp("whole") / "a", numbered(300))
    return {end: Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx")}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case, whole, tmp_path, configure):
    where, change, sentence = DAMAGE[case]
    for end, content in whole.items():
        (tmp_path / f"a{end}").write_bytes(change(content) if end == where else content)
    with pytest.raises(BadData, match=sentence):
        load(configure(str(tmp_path / "a")))


def test_an_empty_document_between_others_is_named(tmp_path, configure):
    prefix = build(tmp_path / "a", [*numbered(20), np.array([], int), *numbered(20)])
    with pytest.raises(BadData, match="a.idx: document 20 is empty"):
        load(configure(prefix))


def test_a_token_id_far_into_the_file_is_found_before_it_reaches_the_model(tmp_path, configure):
    documents = [np.full(1000, 7) for _ in range(100)]
    documents[80][500] = 5001
    documents[81][:] = 8
    corpus = load(configure(build(tmp_path / "a", documents)))
    with pytest.raises(BadData, match=r"token id 5001 in document 80 \(token 80500\), beyond model.vocab=5000"):
        for window in corpus.train:
            assert window.max() < 5000


def test_too_little_text_is_named(tmp_path, configure):
    short, enough = build(tmp_path / "short", [np.arange(20)]), build(tmp_path / "b", numbered(300))
    for path in (short, [0.5, enough, 0.5, short]):
        with pytest.raises(BadData, match="Too little text in .*short: 3 training tokens are less"):
            load(configure(path))
    with pytest.raises(BadData, match="Too little text in .*b: .* sequences of train.seq_len=16"):
        load(configure(enough, global_batch=4000))


@pytest.mark.parametrize(
    "path, sentence",
    [
        (None, "data=megatron needs token files: add data.path=PREFIX"),
        ("{a}x", "ax.idx of data.path does not exist .* python -m data.prepare makes it"),
        (["{a}", "nowhere/b"], "there is no nowhere in"),
        ([], "names no token files: write data.path=PREFIX"),
        (3, "names no token files"),
        ([0.3, "{a}", 0.7], "names no token files"),
        (["{a}", 0.3], "where a weight and a prefix are expected"),
        ([0, "{a}", 1, "{b}"], "the weight 0: take a number above 0"),
        ([float("nan"), "{a}", 1, "{b}"], "the weight nan"),
        ([0.5, "{a}", 0.5, "{a}.idx"], "twice: give it once"),
        ({"{a}": 1.0, "{b}": "much"}, "where a weight and a prefix are expected"),
    ],
)
def test_a_path_that_means_nothing_is_refused_before_anything_starts(path, sentence, tmp_path, configure):
    names = {name: build(tmp_path / name, numbered(50)) for name in "ab"}
    put_in = lambda word: word.format(**names) if isinstance(word, str) else word  # noqa: E731
    if isinstance(path, list):
        path = [put_in(word) for word in path]
    elif isinstance(path, dict):
        path = {put_in(word): weight for word, weight in path.items()}
    else:
        path = put_in(path)
    assert re.search(sentence, " ".join(rules.problems(configure(path), gpus=0)))


def test_paths_may_be_those_that_a_shell_completes():
    assert [source.prefix for source in sources(["a.idx", "b.bin", "c"])] == ["a", "b", "c"]


@pytest.mark.parametrize("typed", ["[0.3,a,0.7,x/b]", "{a:0.3,x/b:0.7}"])
def test_weights_can_be_typed_as_in_megatron_or_as_a_mapping(typed):
    path = compose.compose(["data=megatron", f"data.path={typed}"])[0].data.path
    assert [(source.weight, source.prefix) for source in sources(path)] == [(0.3, "a"), (0.7, "x/b")]


def test_files_without_a_record_show_token_ids_until_a_tokenizer_is_named(tmp_path, configure):
    cfg = configure(build(tmp_path / "a", numbered(300)), sample_length=10)
    assert rules.problems(cfg, gpus=0) == []
    assert load(cfg).tokenizer.decode(load(cfg).tokenizer.encode("5 6")) == "5 6"
    cfg.data.sample_prompt = "hello"
    assert "'hello' has no token ids: nobody recorded the tokenizer" in " ".join(rules.problems(cfg, gpus=0))
    cfg.data.tokenizer = str(made.hugging_face(tmp_path))
    assert rules.problems(cfg, gpus=0) == []
    assert load(cfg).tokenizer.vocab_size == 300


def test_a_damaged_record_is_named(tmp_path, configure):
    prefix = build(tmp_path / "a", numbered(300))
    for content in ("", "[]", "{}", '{"tokenizer": 3, "eod": 0}'):
        Path(f"{prefix}.json").write_text(content)
        assert "a.json is damaged" in " ".join(rules.problems(configure(prefix), gpus=0))


def test_files_of_different_tokenizers_are_not_mixed(tmp_path, configure):
    prefixes = [build(tmp_path / name, numbered(300)) for name in "ab"]
    for prefix, size in zip(prefixes, (300, 310), strict=True):
        made.hugging_face(Path(f"{prefix}_hf"), size).rename(f"{prefix}.tokenizer.json")
        about = {"tokenizer": f"{Path(prefix).name}.tokenizer.json", "eod": 0}
        Path(f"{prefix}.json").write_text(json.dumps(about))
        assert rules.problems(configure(prefix), gpus=0) == []
    assert "mixes files of different tokenizers" in " ".join(rules.problems(configure(prefixes), gpus=0))
    cfg = configure(prefixes[0])
    cfg.data.tokenizer = f"{prefixes[1]}.tokenizer.json"
    assert "is not the tokenizer that made" in " ".join(rules.problems(cfg, gpus=0))
    cfg.data.tokenizer = None
    cfg.model.vocab = 299
    assert "take model.vocab=300." in " ".join(rules.problems(cfg, gpus=0))


def test_opening_the_files_does_not_need_torch(whole, tmp_path):
    for end, content in whole.items():
        (tmp_path / f"a{end}").write_bytes(content)
    assert open_index(str(tmp_path / "a")).documents == 300
    code = f"import sys, data.indexed, data.batches; data.indexed.open_index({str(tmp_path / 'a')!r})\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
