"""Precision, schedule and clipping: what a run does to numbers is what its options say."""

import json
import math

import pytest
import torch

from conf.schema import Clip, ClipKind
from optim import clip

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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
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
    fixed = Clip(kind=ClipKind.fixed, max_norm=0.5)
    assert clip.coefficient(fixed, 0.4) == 1.0
    assert clip.coefficient(fixed, 2.0) == pytest.approx(0.25, rel=1e-5)
    assert clip.coefficient(fixed, math.inf) == 1.0
    assert clip.coefficient(Clip(kind=ClipKind.none, max_norm=0.0), 2.0) == 1.0


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


def test_weight_decay_spares_norms_and_biases(single_rank, cfg_of):
    from optim import build
    from parallel import wrap

    cfg = cfg_of("model=gpt_1b", "model.layers=1", "model.hidden=32", "model.ffn_hidden=64", "model.heads=2",
                 "model.kv_heads=2", "model.vocab=256", "optimizer.weight_decay=0.1")  # fmt: skip
    chunks = wrap.model_chunks(cfg, torch.device("cpu"))
    optimizer = build.optimizer(cfg, chunks)
    build.schedule(cfg, optimizer).step(1)
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in chunks[0].named_parameters():
        assert decayed[id(parameter)] == (0.1 if parameter.dim() > 1 else 0.0), name


# The rule of each optimizer against PyTorch's, step by step on the same gradients.
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("zero", [0, 1])
def test_optimizer_steps_as_its_reference(name, zero, single_rank, cfg_of):
    from optim import build
    from parallel import wrap

    cfg = cfg_of(f"optimizer={name}", "optimizer.weight_decay=0.1", "optimizer.lr=0.01", "schedule=constant",
                 "schedule.warmup_steps=0", "model.layers=1",
                 "model.hidden=32", "model.ffn_hidden=64", "model.heads=2", "model.kv_heads=2",
                 f"parallel.zero={zero}", "clip=none")  # fmt: skip
    chunks = wrap.model_chunks(cfg, torch.device("cpu"))
    optimizer = build.optimizer(cfg, chunks)
    schedule = build.schedule(cfg, optimizer)
    parameters = list(chunks[0].parameters())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    decay = [c for c in copies if c.dim() > 1], [c for c in copies if c.dim() == 1]
    groups = [{"params": decay[0], "weight_decay": 0.1}, {"params": decay[1], "weight_decay": 0.0}]
    o = cfg.optimizer
    reference = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.01),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.01, momentum=o.momentum),
        "adam": lambda: torch.optim.Adam(groups, lr=0.01, betas=(o.beta1, o.beta2), eps=o.eps),
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.01, betas=(o.beta1, o.beta2), eps=o.eps),
    }[name]()
    before = [c.detach().clone() for c in copies]
    for step in range(3):
        for i, (parameter, copy) in enumerate(zip(parameters, copies, strict=True)):
            gradient = torch.randn(copy.shape, generator=torch.Generator().manual_seed(100 * step + i))
            parameter.main_grad.copy_(gradient)
            copy.grad = gradient
        schedule.step(1)
        update = clip.step(optimizer, cfg.clip)
        expected = math.sqrt(sum(float(c.grad.square().sum()) for c in copies))
        assert update.grad_norm == pytest.approx(expected, rel=1e-5)
        reference.step()
    for parameter, copy, start in zip(parameters, copies, before, strict=True):
        torch.testing.assert_close(parameter.detach(), copy.detach(), rtol=1e-6, atol=1e-6)
        assert not torch.equal(copy, start)
