"""Precision, schedule and clipping: what a run does to numbers is what its options say."""

import json
import math

import pytest
import torch

from models import flops
from optim import clip, threshold
from parallel import compose, rules
from tracking.metrics import Meter

SMALL = (
    "train.steps=8 train.global_batch=4 train.micro_batch=2 train.seq_len=64 train.sample_length=0 train.eval_every=8 "
    "train.eval_sequences=4 model.layers=2 model.hidden=64 model.ffn_hidden=128 model.heads=4 model.kv_heads=2 "
    "parallel=single tracking.mode=disabled"
).split()


@pytest.fixture
def steps(train, tmp_path):
    """Run one small point; the metrics of its steps."""

    def run(*overrides: str) -> list[dict]:
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        done = train(*SMALL, *overrides, f"hydra.run.dir={folder}", timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "train/loss" in line]

    return run


def test_half_precision_products_are_rounded_fp32_products():
    from precision.fp16_on_cpu import _in_fp32

    torch.manual_seed(0)
    a, b = torch.randn(64, 300).half(), torch.randn(300, 32).half()
    product = _in_fp32(torch.matmul)(a, b)
    exact = a.double() @ b.double()
    assert product.dtype is torch.float16
    # One rounding, half a unit in the last place of FP16, and the error of an FP32 sum, far smaller.
    spacing = torch.exp2(torch.floor(torch.log2(exact.abs())) - 10)
    assert ((product.double() - exact).abs() <= 0.5 * spacing + 1e-5).all()
    overflow = _in_fp32(torch.matmul)(torch.full((1, 4), 200.0).half(), torch.full((4, 1), 200.0).half())
    assert torch.isinf(overflow).all()
    full = torch.randn(3, 3)
    assert torch.equal(_in_fp32(torch.matmul)(full, full), full @ full)


def test_tf32_on_a_cpu_is_fp32_and_says_so(cfg_of):
    from precision import setup

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert "needs a GPU" in setup.notes(cfg_of("precision=tf32"))["precision"]
    setup.apply(cfg_of("precision=tf32"))
    a, b = torch.randn(2, 256, 256)
    quick = a @ b
    setup.apply(cfg_of("precision=fp32"))
    assert torch.equal(quick, a @ b)


def test_fp16_skips_steps_that_overflow_and_lowers_its_scale(steps):
    metrics = steps("precision=fp16", f"precision.initial_loss_scale={2.0**40}", "precision.hysteresis=1")
    scales = [line["amp/loss_scale"] for line in metrics]
    skipped = [line["amp/skipped_steps"] for line in metrics]
    assert scales[:2] == [2.0**40, 2.0**39]
    assert skipped[0] == 1 and skipped[1] >= 1
    # A skipped step leaves the weights alone, and its gradient has no norm.
    assert metrics[0]["grad/clip_fraction"] == 0
    overflowed = [line for line, scale in zip(metrics, scales, strict=True) if scale > 1e10]
    assert all(not _finite(line["grad/norm"]) for line in overflowed)


def _finite(value) -> bool:
    return isinstance(value, float) and math.isfinite(value)


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_half_precision_trains_like_fp32(steps, precision):
    full, half = (
        [line["train/loss"] for line in steps(f"precision={name}", "precision.initial_loss_scale=1024")]
        for name in ("fp32", precision)
    )
    assert max(abs(a / b - 1) for a, b in zip(half, full, strict=True)) < 1e-2
    assert half != full, "the precision made no difference at all, so it was hardly used"


def test_clipping_bounds_the_update_and_is_measured_when_it_is_off(steps):
    free = steps("clip=none", "optimizer=sgd", "optimizer.lr=0.1", "schedule=constant", "schedule.warmup_steps=0")
    tight = steps("clip=0.001", "optimizer=sgd", "optimizer.lr=0.1", "schedule=constant", "schedule.warmup_steps=0")
    assert all(line["grad/clip_coef"] == 1 and line["grad/clipped"] == 0 for line in free)
    assert all(line["grad/norm"] > 0.01 for line in free)
    assert free[0]["grad/norm"] == tight[0]["grad/norm"]
    assert all(line["grad/clipped"] == 1 and line["grad/clip_fraction"] == 1 for line in tight)
    for line in tight:
        assert line["grad/clip_coef"] == pytest.approx(0.001 / (line["grad/norm"] + 1e-6))
    # With SGD the update is lr times the clipped gradient: hardly anything moves.
    assert abs(tight[-1]["train/loss"] - tight[0]["train/loss"]) < 0.2 < free[0]["train/loss"] - free[-1]["train/loss"]


def test_clip_coefficient():
    assert clip.coefficient(0.5, 0.4) == 1.0
    assert clip.coefficient(0.5, 2.0) == pytest.approx(0.25, rel=1e-5)
    assert clip.coefficient(0.5, math.inf) == 1.0
    assert clip.coefficient(None, 2.0) == 1.0


# Learning rates of ten steps, peak 1, two of them warm-up, a tenth of the peak at the end.
SCHEDULES = {
    "constant": [0.5] + [1.0] * 9,
    "linear": [0.5, 1.0] + [1 - 0.9 * i / 8 for i in range(1, 9)],
    "cosine": [0.5, 1.0] + [0.1 + 0.45 * (1 + math.cos(math.pi * i / 8)) for i in range(1, 9)],
    "wsd": [0.5] + [1.0] * 7 + [0.55, 0.1],
    "inverse_sqrt": [0.5] + [(2 / i) ** 0.5 for i in range(2, 11)],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_gives_the_stated_learning_rates(name, cfg_of):
    from optim import build

    class Optimizer:
        param_groups = [{"lr": 0.0, "weight_decay": 0.0}]

    cfg = cfg_of(
        f"schedule={name}", "train.steps=10", "schedule.warmup_steps=2", "schedule.final_share=0.1",
        "schedule.decay_share=0.2", "optimizer.lr=1.0",
    )  # fmt: skip
    schedule, found = build.schedule(cfg, Optimizer), []
    for _ in range(10):
        schedule.step(1)
        found.append(Optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(SCHEDULES[name])


def test_threshold_by_model_size_is_the_rule_in_between_by_logarithm():
    given = {5e8: 1.0, 1e9: 1.0, 1e10: 0.1, 1e11: 0.01, 5e11: 0.001, 1e13: 0.001}
    assert all(threshold.by_model_size(size) == pytest.approx(norm) for size, norm in given.items())
    assert threshold.by_model_size(math.sqrt(1e9 * 1e10)) == pytest.approx(math.sqrt(0.1))
    assert threshold.by_model_size(math.sqrt(1e11 * 5e11)) == pytest.approx(math.sqrt(0.01 * 0.001))


@pytest.mark.parametrize("model", ["gpt_1b", "llama2_13b", "gpt3_175b"])
def test_threshold_by_model_size_is_in_the_resolved_configuration(model):
    cfg = rules.resolve(compose.compose([f"model={model}", "clip=by_model_size"])[0], gpus=0)
    assert cfg.clip.max_norm == threshold.by_model_size(flops.parameters(cfg.model))


@pytest.fixture
def clipped(single_rank, cfg_of):
    """A clipper over a small model trained by SGD, and a function that makes a step with gradients of a given norm."""
    from optim import build
    from parallel import wrap

    def make(*words: str):
        small = "model.layers=1 model.hidden=32 model.ffn_hidden=64 model.heads=2 model.kv_heads=2".split()
        cfg = cfg_of(
            *small, "optimizer=sgd", "optimizer.lr=1.0", "schedule=constant", "schedule.warmup_steps=0", *words
        )
        chunks = wrap.model_chunks(cfg, torch.device("cpu"))
        optimizer = build.optimizer(cfg, chunks)
        build.schedule(cfg, optimizer).step(1)
        clipper, parameters = clip.Clipper(cfg, chunks, optimizer), list(chunks[0].parameters())

        def step(norm: float) -> tuple[clip.Update, list[torch.Tensor], list[torch.Tensor]]:
            """What happened, the gradients before, and by how much each parameter moved: with SGD the gradient used."""
            drawn = [torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(parameters)]
            scale = norm / math.sqrt(sum(float(g.square().sum()) for g in drawn))
            before = [p.detach().clone() for p in parameters]
            for p, g in zip(parameters, drawn, strict=True):
                p.main_grad.copy_(g * scale)
            update = clipper.step()
            assert update.grad_norm == pytest.approx(norm, rel=1e-5)
            moved = [b - p.detach() for b, p in zip(before, parameters, strict=True)]
            return update, [g * scale for g in drawn], moved

        return step

    return make


def test_adaptive_threshold_is_the_quantile_of_the_last_norms(clipped):
    step, norms = clipped("clip=adaptive", "clip.quantile=0.5", "clip.window=3"), [1.0, 2.0, 4.0, 8.0, 3.0, 3.5]
    for number, norm in enumerate(norms, 1):
        update, gradients, moved = step(norm)
        expected = float(torch.tensor(norms[max(0, number - 3) : number]).quantile(0.5))
        assert update.threshold == pytest.approx(expected, rel=1e-5)
        assert update.clip_coef == pytest.approx(min(1.0, expected / norm), rel=1e-5)
        for gradient, move in zip(gradients, moved, strict=True):
            torch.testing.assert_close(move, gradient * update.clip_coef, rtol=1e-3, atol=1e-6)


def test_clipping_by_layer_bounds_each_tensor_and_by_value_each_element(clipped):
    update, gradients, moved = clipped("clip=per_layer", "clip.max_norm=0.5")(4.0)
    for gradient, move in zip(gradients, moved, strict=True):
        expected = gradient * min(1.0, 0.5 / float(gradient.norm()))
        torch.testing.assert_close(move, expected, rtol=1e-3, atol=1e-6)
    norm = math.sqrt(sum(float(move.square().sum()) for move in moved))
    assert update.clip_coef == pytest.approx(norm / 4.0, rel=1e-4) and norm < 4.0
    update, gradients, moved = clipped("clip=by_value", "clip.max_value=0.01")(4.0)
    for gradient, move in zip(gradients, moved, strict=True):
        torch.testing.assert_close(move, gradient.clamp(-0.01, 0.01), rtol=1e-3, atol=1e-6)
    assert 0 < update.clip_coef < 1 and update.threshold is None


def test_a_spike_leaves_the_weights_alone_and_is_counted(clipped, cfg_of):
    step = clipped("clip=1.0", "clip.skip_above=6", "clip.skip_window=8")
    assert not step(1000.0)[0].spike, "nothing to judge by yet"
    step = clipped("clip=1.0", "clip.skip_above=6", "clip.skip_window=8")
    calm = [step(1.0 + 0.1 * (i % 3)) for i in range(4)]
    spike, _, moved = step(50.0)
    assert spike.spike and not any(update.spike for update, *_ in calm)
    assert all(float(move.abs().max()) == 0 for move in moved)
    after, _, moved = step(1.1)
    assert not after.spike and all(float(move.abs().max()) > 0 for move in moved)
    meter = Meter(cfg_of("clip.skip_above=6"), 1, 1e9, None)
    raw = dict(step=1, tokens=1, loss=1.0, lr=1.0, grad_norm=50.0, clip_coef=1.0, clipped=False, loss_scale=1.0,
               skipped=False, step_s=1.0, data_wait_s=0.0, peak_gib=None)  # fmt: skip
    assert "grad/skipped_spikes" not in meter.step(raw)
    found = [meter.step(raw | dict(step=2, spike=True)), meter.step(raw | dict(step=3, spike=False, clipped=True))]
    assert [line["grad/skipped_spikes"] for line in found] == [1, 1]
    assert found[1]["grad/clip_fraction"] == 0.5, "a skipped step is no update"


def test_a_run_says_what_each_threshold_would_have_clipped(train, tmp_path):
    done = train(*SMALL, "clip=none", "train.steps=12", "clip.report_every=10", f"hydra.run.dir={tmp_path / 'run'}",
                 timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    norms = [line["grad/norm"] for line in lines if "grad/norm" in line]
    report = json.loads((tmp_path / "run" / "result.json").read_text())["grad_norms"]
    assert report["steps"] == len(norms) == 12 and report["max"] == max(norms)
    assert report["would_clip"] == {str(t): sum(n > t for n in norms) / 12 for t in (1.0, 0.1, 0.01, 0.001)}
    assert "gradient norm of the last 10 steps" in done.stdout and "would clip one step in ten" in done.stdout
    assert "clipped by 0.1" in (tmp_path / "run" / "report.html").read_text()
