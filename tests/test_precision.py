"""Number formats: what each option keeps in which, the same under every layout, and what the probes say is lost."""

import os
from pathlib import Path

import layout_steps
import pytest
import torch

from parallel import compose, devices, frozen, rules

REPO = Path(__file__).resolve().parent.parent


def built(cfg):
    from optim import build
    from parallel import wrap

    chunks = wrap.model_chunks(cfg, torch.device("cpu"))
    return chunks, build.optimizer(cfg, chunks)


@pytest.mark.parametrize("layout", ["single", "zero1", "zero2", "zero3"])
def test_pure_bf16_keeps_no_fp32_tensor(layout, single_rank):
    from optim.clip import Clipper
    from parallel.checkpoint_state import local, owned

    cfg = layout_steps.config(layout, "train.steps=1 precision=bf16_pure parallel.dp=1")
    chunks, optimizer = built(cfg)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    for part in owned(chunks, optimizer, cfg.parallel.zero):
        assert part.master.dtype is torch.bfloat16
        moments = [held for held in part.rule.state[part.master].values() if torch.is_tensor(held) and held.dim()]
        assert moments and {held.dtype for held in moments} == {torch.bfloat16}
        assert local(part.master).numel() == part.end - part.start
    assert {p.dtype for chunk in chunks for p in chunk.parameters()} == {torch.bfloat16}
    if layout == "single":
        for p in chunks[0].parameters():
            p.main_grad.fill_(1.0)
            assert p.main_grad.dtype is torch.bfloat16
        count = sum(p.numel() for p in chunks[0].parameters())
        # The norm is more exact than the three digits of BF16.
        assert Clipper(cfg, chunks, optimizer).step().grad_norm == pytest.approx(count**0.5, rel=1e-5)


def test_a_probe_counts_what_a_format_does_not_hold(single_rank):
    from precision.probes import Probe

    cfg = layout_steps.config("single", "train.steps=1 precision=fp32 probe.every=1 probe.format=fp16")
    chunks, optimizer = built(cfg)
    probe, modules = Probe(cfg, chunks, optimizer), list(chunks[0].modules())
    hooks = [len(m._forward_hooks) for m in modules]
    probe.begin(1)
    assert [len(m._forward_hooks) for m in modules] != hooks
    for name, p in chunks[0].named_parameters():
        p.main_grad.fill_(0.0 if "embedding" in name else 1.0)
        if name.endswith("layers.0.mlp.linear_fc2.weight"):
            flat = p.main_grad.view(-1)
            flat[0], flat[1], flat[2], flat[3] = 2.0**-25, 1.01 * 2.0**-25, 65519.0, 65520.0
            elements = sum(q.numel() for n, q in chunks[0].named_parameters() if ".layers.0." in n)
    optimizer.prepare_grads()
    probe.gradients(1.0)
    assert [len(m._forward_hooks) for m in modules] == hooks
    with torch.no_grad():
        for p in chunks[0].parameters():
            p.view(-1)[0] += 1.0
    found, histograms = probe.end(updated=True)
    assert found["probe/underflow/layer1"] == pytest.approx(1 / elements)
    assert found["probe/overflow/layer1"] == pytest.approx(1 / elements)
    assert found["probe/underflow/layer2"] == found["probe/overflow/output"] == 0
    tensors = sum(1 for n, _ in chunks[0].named_parameters() if ".layers.0." in n)
    assert found["probe/lost_updates/layer1"] == pytest.approx(1 - tensors / elements)
    assert found["probe/grad_norm/embedding"] == 0
    counts, edges = histograms["probe/gradient_exponent"]
    by_exponent = dict(zip(edges, counts, strict=False))
    assert (edges[0], by_exponent[-25], by_exponent[15]) == (-25, 2, 2)
    # Nothing is measured in other steps, nor where probes are off.
    probe.every = 2
    probe.begin(1)
    probe.gradients(1.0)
    assert probe.end(updated=True) == ({}, {}) and [len(m._forward_hooks) for m in modules] == hooks


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_emulated_fp8_takes_the_nearest_number_that_the_format_has(name, single_rank):
    from precision.fp8_emulated import rounded

    format = getattr(torch, f"float8_{name}")
    numbers = torch.arange(256, dtype=torch.uint8).view(format).float()
    numbers = numbers[numbers.isfinite()].unique()
    values = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 2000)
    found = rounded(values, format)
    scale = 2.0 ** torch.floor(torch.log2(torch.finfo(format).max / values.abs().max()))
    nearest = (values[:, None] * scale - numbers).abs().min(dim=1).values
    assert torch.equal((found * scale - values * scale).abs(), nearest)
    assert torch.equal(rounded(values.bfloat16(), format), rounded(values.bfloat16().float(), format).bfloat16())
    assert not rounded(torch.zeros(4), format).any()
    for broken in (torch.inf, torch.nan):
        assert not rounded(torch.tensor([1.0, broken]), format)[1].isfinite()


def test_emulated_fp8_layers_multiply_rounded_inputs_both_ways(single_rank):
    from models.gpt import transformer_config
    from precision.fp8_emulated import BACKWARD, FORWARD, Fp8ColumnParallelLinear, rounded

    cfg = layout_steps.config("single", "train.steps=1 precision=fp8")
    layer = Fp8ColumnParallelLinear(
        32, 48, config=transformer_config(cfg), init_method=None, bias=False, gather_output=False
    )
    torch.manual_seed(0)
    with torch.no_grad():
        layer.weight.normal_()
    x = torch.randn(5, 2, 32).bfloat16().requires_grad_()
    gradient = torch.randn(5, 2, 48).bfloat16()
    output = layer(x)[0]
    output.backward(gradient)
    held, weight = rounded(x.detach(), FORWARD), rounded(layer.weight.detach(), FORWARD)
    back = rounded(gradient, BACKWARD)
    assert torch.equal(output, held @ weight.t())
    assert torch.equal(x.grad, back @ weight)
    assert torch.equal(layer.weight.grad, back.view(-1, 48).t() @ held.view(-1, 32))
    assert not torch.equal(held, x) and not torch.equal(back, gradient)


def nvidia_smi(folder: Path, capability: str) -> None:
    """A machine with one GPU of that compute capability, as far as nvidia-smi can tell."""
    listing = '-L) echo "GPU 0: NVIDIA (UUID: GPU-0)";;'
    (folder / "nvidia-smi").write_text(f'#!/bin/sh\ncase "$1" in {listing} *) echo {capability};; esac\n')
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("capability", "computed_by"), [("8.0", "emulated"), ("9.0", "transformer_engine"), (None, "emulated")]
)
def test_fp8_is_real_where_the_gpu_has_it_and_refused_by_name_without_the_package(
    capability, computed_by, tmp_path, monkeypatch
):
    if capability:
        nvidia_smi(tmp_path, capability)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    devices.capability.cache_clear()
    cfg = compose.compose(["precision=fp8", "parallel=single", "cluster=local"])[0]
    resolved = rules.resolve(cfg, gpus=1 if capability else 0)
    found = rules.problems(cfg, gpus=1 if capability else 0)
    devices.capability.cache_clear()
    assert resolved.precision.fp8 == computed_by
    assert resolved.precision.name == ("fp8 (emulated)" if computed_by == "emulated" else "fp8")
    assert any("transformer-engine, which is not installed" in sentence for sentence in found) == (capability == "9.0")


def test_a_run_tells_which_layers_are_in_fp8():
    from precision import table

    cfg = layout_steps.config("single", "train.steps=1 precision=fp8 precision.bf16_last_layers=1")
    said = table.text(cfg)
    assert "fp8 (emulated)" in said and "layers 1 to 1 of 2" in said and "the other layers" in said
    assert table.rows(cfg)["master weights"] == "fp32" and table.rows(cfg)["between stages"] == "bf16"


def test_emulation_is_in_the_name_wherever_a_run_is_shown(tmp_path):
    from tracking.result import named
    from tracking.wandb_run import identity

    cfg, choices, words, _ = compose.compose(["precision=fp8", "launch.device=cpu"])
    point = frozen.freeze(compose.check(cfg), tmp_path, choices, words)
    assert "fp8 (emulated)" in named(point.choices) and point.cfg.precision.name == "fp8 (emulated)"
    about = identity(tmp_path, point.choices)
    assert "precision=fp8 (emulated)" in about["tags"] and "fp8(emulated)" in about["name"]
