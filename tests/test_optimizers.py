"""The ten optimizers: each is its published rule, under every layout, and takes decay, formats and places as said."""

import functools
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from checkpointed import ENDLESS, REPO, at, runner, steps
from optimizer_rank import SMALL, STEPS, configuration, trace
from optimizer_reference import reference
from test_checkpoint import deviations as distances

from optim import build, clip
from parallel import checkpoint_io, compose, launch, update_rules, wrap

RANK = REPO / "tests" / "optimizer_rank.py"

MODEL = (
    "model.layers=1 model.hidden=32 model.ffn_hidden=64 model.heads=4 model.kv_heads=2 model.vocab=256 "
    "schedule=constant schedule.warmup_steps=0 clip=none"
).split()
NAMES = list(update_rules.READS)


def built(cfg):
    """Chunks, optimizer and schedule of a configuration in this process."""
    chunks = wrap.model_chunks(cfg, torch.device("cpu"))
    optimizer = build.optimizer(cfg, chunks)
    return chunks, optimizer, build.schedule(cfg, optimizer)


def gradient(like: torch.Tensor, step: int, number: int) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(100 * step + number))


# Step by step on the same gradients, with the learning rate and a decay that show every term.
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_optimizer_steps_as_its_reference(name, zero, single_rank, cfg_of):
    cfg = cfg_of(*MODEL, f"optimizer={name}", "optimizer.weight_decay=0.1", f"parallel.zero={zero}")
    chunks, optimizer, schedule = built(cfg)
    clipper = clip.Clipper(cfg, chunks, optimizer)
    parameters = {name.removeprefix("module."): p for name, p in chunks[0].named_parameters()}
    copies = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    rule, before = reference(copies, cfg.optimizer), {name: c.detach().clone() for name, c in copies.items()}
    for step in range(4):
        for number, (parameter, copy) in enumerate(zip(parameters.values(), copies.values(), strict=True)):
            copy.grad = gradient(copy, step, number)
            parameter.main_grad.copy_(copy.grad)
        schedule.step(1)
        update = clipper.step()
        expected = math.sqrt(sum(float(c.grad.square().sum()) for c in copies.values()))
        assert update.grad_norm == pytest.approx(expected, rel=1e-5)
        rule.step()
        for which, copy in copies.items():
            torch.testing.assert_close(parameters[which].detach(), copy.detach(), rtol=1e-6, atol=1e-6)
    assert not [which for which, copy in copies.items() if torch.equal(copy, before[which])]


def test_weight_decay_spares_norms_and_biases(single_rank, cfg_of):
    cfg = cfg_of("model=gpt_1b", "model.layers=1", "model.hidden=32", "model.ffn_hidden=64", "model.heads=2",
                 "model.kv_heads=2", "model.vocab=256", "optimizer.weight_decay=0.1")  # fmt: skip
    chunks, optimizer, schedule = built(cfg)
    schedule.step(1)
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in chunks[0].named_parameters():
        assert decayed[id(parameter)] == (0.1 if parameter.dim() > 1 else 0.0), name


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """`traces(ranks, cases)` trains each case, {name: overrides}, on so many ranks started once; what each gave."""

    def run(ranks: int, cases: dict[str, str], folder: Path | None = None) -> dict[str, list[list[float]]]:
        folder = folder or tmp_path_factory.mktemp("ranks")
        (folder / "cases.json").write_text(json.dumps({name: words.split() for name, words in cases.items()}))
        composed, choices, words, _ = compose.compose([*SMALL, "parallel=dp", f"parallel.dp={ranks}"])
        frozen = compose.freeze(compose.check(composed), folder, choices, words)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(REPO))
            launch.run(folder, frozen, entry=[sys.executable, "-u", str(RANK), str(folder)])
        return json.loads((folder / "traces.json").read_text())

    return run


@functools.cache
def traced_alone(words: str) -> list[list[float]]:
    return trace(configuration(["parallel=single", *words.split()]))


def deviations(found: dict[str, list], single_rank, tolerance: float = 1e-5) -> dict[str, float]:
    """Cases whose losses are not those of one process (or whose gradient norms, within ten times as much)."""
    wrong = {}
    for name, traced in found.items():
        alone = traced_alone(name.partition(" ")[2])
        assert abs(alone[0][0] - alone[-1][0]) > 1e-3, f"{name}: nothing was learnt that could differ"
        for ours, theirs in zip(traced, alone, strict=True):
            far = [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
            if far[0] > tolerance or max(far[1:]) > 10 * tolerance:
                wrong[name] = max(far)
    return wrong


def cases(layouts: list[str], words: list[str]) -> dict[str, str]:
    return {f"{layout} {more}": f"parallel={layout} {more}" for layout in layouts for more in words}


# Rules and bounds that look at whole tensors, where a rank has a piece of them.
WHOLE = [f"optimizer={name}" for name in ("lamb", "adafactor", "muon")]
BOUNDS = [
    "clip=per_layer clip.max_norm=0.3",
    "clip=by_value clip.max_value=0.003",
    "clip=adaptive clip.quantile=0.1 clip.skip_above=0.5 clip.skip_window=2",
]


@pytest.mark.slow
def test_whole_tensor_rules_and_bounds_are_the_same_on_two_ranks(traces, single_rank, tmp_path):
    written = ["tp2 optimizer=muon", "zero1 optimizer=adafactor"]
    for name in written:
        (tmp_path / "saved" / name).mkdir(parents=True)
    found = traces(2, cases(["tp2"], WHOLE + BOUNDS) | cases(["zero1"], [*WHOLE[1:], BOUNDS[0]]), tmp_path)
    assert not deviations(found, single_rank)
    assert all(any(step[2] < 1 for step in traced) for name, traced in found.items() if "clip.max" in name)
    # What a checkpoint of theirs holds is what one of one process does.
    for name in written:
        (tmp_path / "alone").mkdir()
        trace(configuration(["parallel=single", name.partition(" ")[2]]), save=tmp_path / "alone")
        ours, theirs = (checkpoint_io.read(tmp_path / folder) for folder in (f"saved/{name}", "alone"))
        assert not {key: far for key, far in distances(ours, theirs).items() if far > 1e-3}
        shutil.rmtree(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [["tp2", "tp2_sp"], ["pp2"], ["pp2_vpp2"], ["cp2"], ["zero1", "zero2", "zero3"]])
def test_every_optimizer_and_bound_is_the_same_on_two_ranks(layouts, traces, single_rank):
    names = [f"optimizer={name}" for name in NAMES] + BOUNDS
    assert not deviations(traces(2, cases(layouts, names)), single_rank)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2_pp2", "tp2_zero1", "pp2_zero1", "tp2_zero3", "pp2_zero3"])
def test_every_optimizer_and_bound_is_the_same_on_four_ranks(layout, traces, single_rank):
    names = [f"optimizer={name}" for name in NAMES] + BOUNDS
    assert not deviations(traces(4, cases([layout], names)), single_rank)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_offloaded_moments_and_mixed_precision_work_with_every_optimizer(layout, traces, single_rank):
    names = [f"optimizer={name} precision=bf16" for name in NAMES]
    names += [f"optimizer={name} parallel.offload=optimizer" for name in NAMES if name not in ("sgd", "adafactor")]
    wrong = deviations(traces(2, cases([layout], names)), single_rank)
    assert not {name: far for name, far in wrong.items() if "bf16" not in name or far > 1e-2}


@pytest.mark.parametrize("name", ["momentum", "adamw", "lamb", "lion", "muon"])
def test_moments_in_bf16_are_kept_in_bf16_and_change_the_run_a_little(name, single_rank, cfg_of):
    words = [*MODEL, f"optimizer={name}", "optimizer.moments=bf16"]
    chunks, optimizer, schedule = built(cfg := cfg_of(*words))
    clipper = clip.Clipper(cfg, chunks, optimizer)
    for number, parameter in enumerate(chunks[0].parameters()):
        parameter.main_grad.copy_(gradient(parameter, 0, number))
    schedule.step(1)
    clipper.step()
    states = optimizer.chained_optimizers[0].optimizer.state.values()
    moments = [t for state in states for kind, t in state.items() if kind != "step"]
    assert moments and all(t.dtype is torch.bfloat16 and t.abs().max() > 0 for t in moments)
    rounded, full = (trace(configuration(["parallel=single", f"optimizer={name}", f"optimizer.moments={m}"]))
                     for m in ("bf16", "fp32"))  # fmt: skip
    assert rounded != full
    assert all(abs(a[0] / b[0] - 1) < 1e-2 for a, b in zip(rounded, full, strict=True))


def test_offloaded_moments_compute_the_same(single_rank):
    for name in ("adamw", "rmsprop", "lamb"):
        words = ["parallel=single", f"optimizer={name}"]
        here, there = (trace(configuration([*words, *more])) for more in ([], ["parallel.offload=optimizer"]))
        assert all(a == pytest.approx(b, rel=1e-6) for a, b in zip(there, here, strict=True)), name


GOES_ON = [("adafactor", 3), ("muon", 1), ("adamw optimizer.moments=bf16", 0)]
ALL_GO_ON = [(name, zero) for zero in (0, 1, 3) for name in ("adagrad", "rmsprop", "lamb", "lion", "adafactor", "muon")]


@pytest.mark.parametrize(
    ("name", "zero"), [*GOES_ON, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL_GO_ON)]
)
def test_a_rule_goes_on_from_its_moments_bit_for_bit(name, zero, single_rank, tmp_path):
    cfg = configuration(["parallel=single", f"parallel.zero={zero}", *f"optimizer={name}".split()])
    whole = trace(cfg, 2 * STEPS)
    assert trace(cfg, save=tmp_path) == whole[:STEPS]
    assert trace(cfg, load=tmp_path) == whole[STEPS:]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "pp2", "cp2", "zero1", "zero2", "zero3", "tp2_pp2", "tp2_zero3"])
def test_moments_move_to_every_layout(layout, traces, single_rank, tmp_path):
    more = ["", " parallel.offload=optimizer", " precision=bf16"]
    names = [f"optimizer={name}" for name in NAMES] + [f"optimizer={n}{m}" for n in ("adamw", "muon") for m in more[1:]]
    points = cases([layout], names)
    for name, words in points.items():
        for folder in ("given", "saved"):
            (tmp_path / folder / name).mkdir(parents=True)
        rule = next(word for word in words.split() if word.startswith("optimizer="))
        trace(configuration(["parallel=single", rule]), save=tmp_path / "given" / name)
    traces(4 if "_" in layout and layout != "tp2_sp" else 2, points, tmp_path)
    for name in points:
        ours, theirs = (checkpoint_io.read(tmp_path / folder / name) for folder in ("saved", "given"))
        assert set(ours) == set(theirs) and {key.partition("/")[0] for key in ours} > {"weights"} or "sgd" in name
        assert not [key for key in theirs if not torch.equal(ours[key], theirs[key])], name


SAME = [
    "optimizer=muon parallel=zero1",
    "optimizer=adafactor parallel=tp2",
    "optimizer=adamw optimizer.moments=bf16 parallel=zero3",
    "clip=adaptive clip.window=4 clip.quantile=0.5 clip.skip_above=1 clip.skip_window=2 parallel=tp2",
]


@pytest.mark.slow
@pytest.mark.parametrize("words", SAME)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(words, tmp_path):
    run, words = runner(tmp_path), [*words.split(), *ENDLESS, "train.steps=6", "checkpoint.every=3"]
    whole = run("whole", *words)
    rest = run("rest", *words, f"checkpoint.resume={at(whole, 3)}")
    for metric in ("train/loss", "grad/norm", "grad/clip_coef"):
        assert steps(rest, metric) == {step: x for step, x in steps(whole, metric).items() if step > 3}, metric
    ours, theirs = checkpoint_io.read(at(rest, 6)), checkpoint_io.read(at(whole, 6))
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]


REFUSED = {
    "momentum for adamw": ("optimizer.momentum=0.9", "not read by adamw", "optimizer.momentum=null"),
    "muon by name alone": ("optimizer.name=muon", "optimizer.momentum has no value", "take optimizer=muon"),
    "no moments to round": ("optimizer=sgd optimizer.moments=bf16", "has no moments", "moments=fp32"),
    "no moments to offload": ("optimizer=adafactor parallel.offload=optimizer", "nothing to offload"),
    "moments in fp16": ("optimizer.moments=fp16", "fp32 or bf16"),
    "mup for muon": ("optimizer=muon model.mup=true", "optimizer=adamw"),
    "threshold by size and by hand": ("clip=by_model_size clip.max_norm=0.3", "computes clip.max_norm=1", "clip=1.0"),
    "quantile of a fixed threshold": ("clip.quantile=0.5", "not read by fixed", "take clip=1.0"),
    "quantile above one": ("clip=adaptive clip.quantile=1.5", "from 0 to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_rule_or_a_bound_cannot_do_is_refused_before_anything_starts(case):
    words, *mentioned = REFUSED[case]
    with pytest.raises(compose.Refused) as refusal:
        configuration(["parallel=single", *words.split()])
    assert all(text in " ".join(refusal.value.sentences) for text in mentioned), refusal.value.sentences
