"""A run goes on from a checkpoint under any layout, with every bit of its state, and like an uninterrupted one."""

import random
import sys
from pathlib import Path

import pytest
import torch
from checkpointed import ENDLESS, REPO, SMALL, TRAINED, at, runner, steps

from parallel import checkpoint_files, checkpoint_io, compose, launch
from parallel.checkpoint_map import Place, boxes

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs("name", ...)` trains in a folder of that name, which the tests of this module share."""
    return runner(tmp_path_factory.mktemp("runs"))


CHAIN = ["tp2", "pp2", "zero3", "tp2_pp2", "single"]
LINK = 5


def deviations(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative norm of the difference of each tensor."""
    return {
        name: float((ours[name] - theirs[name]).norm() / theirs[name].norm())
        for name in theirs
        if not name.startswith("generators/")
    }


@pytest.mark.slow
def test_a_run_that_changes_its_layout_every_five_steps_trains_like_one_that_never_does(runs):
    last = LINK * len(CHAIN)
    whole = runs("whole", *ENDLESS, "parallel=single", f"train.steps={last}", f"checkpoint.every={LINK}")
    expected, rates, resume = steps(whole), steps(whole, "train/lr"), []
    for number, layout in enumerate(CHAIN, 1):
        done = LINK * number
        words = [f"parallel={layout}", f"train.steps={done}", f"checkpoint.every={LINK}", *resume]
        link = runs(f"link_{number}", *ENDLESS, *words)
        resume = [f"checkpoint.resume={link}"]
        found = steps(link)
        assert sorted(found) == list(range(done - LINK + 1, done + 1))
        assert max(abs(loss / expected[step] - 1) for step, loss in found.items()) < TOLERANCE, layout
        assert all(rate == rates[step] for step, rate in steps(link, "train/lr").items())
    ours, theirs = checkpoint_io.read(at(link, last)), checkpoint_io.read(at(whole, last))
    found = deviations(ours, theirs)
    assert {name.partition("/")[0] for name in found} == {"weights", "exp_avg", "exp_avg_sq"}
    # Gradients agree to some 1e-6 of their norm; Adam's division lets weights of tiny gradients differ more, and the
    # moments are sums of gradients that hardly cancel out.
    allowed = {name: 1e-4 if name.startswith("weights/") else 1e-3 for name in found}
    assert not {name: far for name, far in found.items() if far > allowed[name]}
    steps_before = deviations(checkpoint_io.read(at(whole, last - LINK)), theirs)
    assert all(far > 5 * allowed[name] for name, far in steps_before.items()), "a comparison that cannot fail"
    about = checkpoint_files.read_about(at(link, last))
    assert (about["updates"], about["step"], about["samples"]) == (last, last, 8 * last)


@pytest.fixture
def move(monkeypatch):
    """`move(folder, checkpoint, ...)` is the checkpoint after ranks of another layout have read and written it."""
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    return moved


def moved(folder: Path, checkpoint: Path, *words: str) -> Path:
    words = [*words, "checkpoint.every=1", f"checkpoint.resume={checkpoint}"]
    composed, choices, overrides, _ = compose.compose([*SMALL, *ENDLESS, *words])
    frozen = compose.freeze(compose.check(composed), folder, choices, overrides)
    entry = [sys.executable, "-u", str(REPO / "tests" / "checkpoint_rank.py"), str(folder)]
    launch.run(folder, frozen, entry=entry)
    return at(folder, checkpoint_files.read_about(checkpoint)["step"])


def assert_same_bits(ours: Path, theirs: Path) -> None:
    ours, theirs = checkpoint_io.read(ours), checkpoint_io.read(theirs)
    names = {name for name in theirs if not name.startswith("generators/")}
    assert names <= set(ours)
    assert not [name for name in names if not torch.equal(ours[name], theirs[name])]


ALL_MOVES = [
    f"parallel={layout}"
    for layout in "dp2 tp2 tp2_sp pp2 pp2_vpp2 cp2 zero1 zero2 zero3 tp2_pp2 tp2_dp2 tp2_zero1 pp2_zero1 tp2_zero3 "
    "pp2_zero3".split()
] + [
    "parallel=zero1 parallel.overlap=true parallel.bucket_mb=0.05",
    "parallel=zero3 precision=bf16",
    "parallel=zero2 precision=fp16",
    "parallel=zero1 precision=fp16",
    "parallel=pp2_vpp2 parallel.zero=1 parallel.dp=2 precision=bf16",
    "parallel=single precision=fp16",
]


@pytest.mark.parametrize(
    "words", ["pp2_vpp2 precision=bf16", *(pytest.param(w, marks=pytest.mark.slow) for w in ("zero3", "tp2_pp2"))]
)
def test_a_checkpoint_loads_under_another_layout_and_precision_with_every_bit_of_its_moments(
    words, trained, move, tmp_path
):
    assert_same_bits(move(tmp_path / "run", at(trained, 6), *f"parallel={words}".split()), at(trained, 6))


@pytest.mark.slow
@pytest.mark.parametrize("words", ALL_MOVES)
def test_every_layout_reads_and_writes_every_bit(words, runs, move, tmp_path):
    sharded = at(runs("sharded", *ENDLESS, "parallel=zero3", "train.steps=2", "checkpoint.every=2"), 2)
    after = move(tmp_path / "there", sharded, *words.split())
    assert_same_bits(after, sharded)
    assert_same_bits(move(tmp_path / "back", after, "parallel=single"), sharded)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["parallel=pp2", "parallel=pp2_zero1", "parallel=tp2_pp2", "parallel=zero3"])
def test_tied_embeddings_biases_and_learned_positions_move_too(words, runs, move, tmp_path):
    other = (
        "model.tie_embeddings=true model.bias=true model.position=learned model.norm=layernorm model.activation=gelu"
    )
    other = [*other.split(), "model.kv_heads=2"]
    run = runs("other_model", *ENDLESS, *other, "parallel=tp2", "train.steps=2", "checkpoint.every=2")
    after = move(tmp_path / "there", at(run, 2), *other, *words.split())
    assert_same_bits(after, at(run, 2))
    assert_same_bits(move(tmp_path / "back", after, *other, "parallel=single"), at(run, 2))


SAME = [
    "parallel=single",
    "parallel=single optimizer=momentum",
    "parallel=zero1 precision=bf16",
    "parallel=zero2",
    "parallel=zero3 precision=fp16",
    "parallel=zero3 precision=bf16",
    "parallel=tp2_sp model.dropout=0.1",
    "parallel=pp2_vpp2",
    "parallel=cp2",
    "parallel=tp2_pp2 precision=bf16",
    "parallel=pp2_zero1 parallel.overlap=true parallel.bucket_mb=0.05",
    "parallel=pp2 model.tie_embeddings=true",
]


def assert_goes_on_as_if_uninterrupted(whole: Path, rest: Path) -> None:
    for metric in ("train/loss", "train/lr", "grad/norm", "amp/loss_scale"):
        expected = {step: value for step, value in steps(whole, metric).items() if step > 3}
        assert len(expected) == 3 and steps(rest, metric) == expected, metric
    ours, theirs = checkpoint_io.read(at(rest, 6)), checkpoint_io.read(at(whole, 6))
    assert set(ours) == set(theirs) and any(name.startswith("generators/") for name in ours)
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    about = [checkpoint_files.read_about(at(run, 6)) for run in (rest, whole)]
    assert all(about[0][name] == about[1][name] for name in ("updates", "loss_scale", "tokens", "samples"))


def test_a_resumed_run_has_the_losses_and_the_data_of_the_uninterrupted_one_bit_for_bit(trained, runs):
    assert len(set(steps(trained).values())) == 6, "every step reads other data"
    assert_goes_on_as_if_uninterrupted(trained, runs("resumed", *TRAINED, f"checkpoint.resume={at(trained, 3)}"))


@pytest.mark.slow
@pytest.mark.parametrize("words", SAME)
def test_under_every_layout_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(words, runs):
    name, words = f"same_{SAME.index(words)}", [*words.split(), *TRAINED[3:]]
    whole = runs(name, *words)
    assert_goes_on_as_if_uninterrupted(whole, runs(f"{name}_resumed", *words, f"checkpoint.resume={at(whole, 3)}"))


@pytest.mark.slow
def test_a_run_goes_on_in_another_precision_and_says_what_becomes_of_the_loss_scale(runs):
    said, resume = {}, []
    for number, precision in enumerate(["fp32", "bf16", "fp16", "fp32"], 1):
        words = [f"precision={precision}", "parallel=single", f"train.steps={3 * number}", "checkpoint.every=3"]
        run = runs(f"precision_{number}", *ENDLESS, *words, *resume)
        resume, said[number] = [f"checkpoint.resume={run}"], " ".join((run / "said.txt").read_text().split())
        scale = checkpoint_files.read_about(at(run, 3 * number))["loss_scale"]
        assert (scale is not None) == (precision == "fp16")
    assert "written in fp32" in said[2] and "loss scale" not in said[2]
    assert "written in bf16, which has no loss scale, so that it starts anew" in said[3]
    assert f"written in fp16, whose loss scale of {steps(runs('precision_3'), 'amp/loss_scale')[9]:g}" in said[4]
    whole = runs("in_fp32", *ENDLESS, "parallel=single", "train.steps=12")
    for number in (2, 3, 4):
        for step, loss in steps(runs(f"precision_{number}")).items():
            assert abs(loss / steps(whole)[step] - 1) < 2e-2, (number, step)


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_data_says_so(trained, runs):
    resume = [*TRAINED, "train.steps=4", f"checkpoint.resume={at(trained, 3)}"]
    words = {"same": [], "other": ["data=text", f"data.path={__file__}"]}
    said = {name: (runs(f"{name}_data", *resume, *data) / "said.txt").read_text() for name, data in words.items()}
    assert "written on other data" in " ".join(said["other"].split()) and "other data" not in said["same"]


def test_ranges_of_a_parameter_are_cut_into_boxes_that_fill_it_once():
    place = Place("w", (3, 8, 10), (1, 4, 5), 1, (4, 5), 20, True)  # rows 4-7, columns 5-9 of layer 1, after 20 others
    random.seed(0)
    for _ in range(200):
        cuts = sorted({0, 60, *random.sample(range(60), 3)})
        whole = torch.zeros(3, 8, 10)
        for start, end in zip(cuts, cuts[1:], strict=False):
            flat = torch.arange(start, end, dtype=torch.float32) + 1
            for box in boxes(place, start, end):
                where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                whole[where] += flat[box.first : box.last].view(box.shape)
        expected = torch.zeros(3, 8, 10)
        expected[1, 4:8, 5:10] = torch.arange(20, 40, dtype=torch.float32).view(4, 5) + 1
        assert torch.equal(whole, expected)
