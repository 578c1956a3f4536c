"""Every layout trains the same thing: losses and gradient norms of ten steps against one process.

Each named configuration is a point of one sweep, started as a user would. What is compared with what is in `AGREE`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Small enough that a point costs its start and little more; shapes that every layout below can divide.
SMALL = (
    "train.steps=10 train.global_batch=8 train.micro_batch=2 train.seq_len=64 train.sample_length=2 train.eval_every=5 "
    "train.eval_sequences=8 schedule.warmup_steps=2 model.layers=4 model.hidden=64 model.ffn_hidden=176 model.heads=4 "
    "model.kv_heads=4 tracking.mode=disabled"
).split()
LOSS, NORM = 1e-4, 1e-3

AGREE = {
    "two and one ranks in FP32": (
        "parallel=single,dp2,tp2,tp2_sp,pp2,pp2_vpp2,cp2,zero1,zero2,zero3 precision=fp32",
        ["dp2", "tp2", "tp2_sp", "pp2", "pp2_vpp2", "cp2", "zero1", "zero2", "zero3"],
    ),
    "four ranks in FP32": (
        "parallel=single,tp2_pp2,pp2_zero3,tp2_zero3 precision=fp32",
        ["tp2_pp2", "pp2_zero3", "tp2_zero3"],
    ),
    "FP16 with dynamic loss scaling": (
        "parallel=single,tp2,pp2,zero1,zero3 precision=fp16",
        ["tp2", "pp2", "zero1", "zero3"],
    ),
}


def sweep(folder: Path, *overrides: str, timeout: int = 600) -> dict[str, list[dict]]:
    """Run a sweep over `parallel`; metrics of each point by the name of its layout."""
    command = [sys.executable, "train.py", "-m", *SMALL, *overrides, f"hydra.sweep.dir={folder}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "RANK", "WORLD", "SLURM"))}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    points = {}
    for result in folder.glob("*/result.json"):
        outcome = json.loads(result.read_text())
        assert outcome["status"] == "ok", outcome
        lines = (result.parent / "metrics.jsonl").read_text().splitlines()
        points[outcome["choices"]["parallel"]] = [json.loads(line) for line in lines]
    return points


def deviation(name: str, ours: list[dict], reference: list[dict]) -> float:
    """Largest relative deviation of a metric; both must have it in the same lines."""
    pairs = [(a.get(name), b.get(name)) for a, b in zip(ours, reference, strict=True)]
    pairs = [(a, b) for a, b in pairs if not (a is None and b is None)]
    assert len(pairs) >= 3, f"{name} is hardly ever there"
    # A step that the loss scaler skipped has "NaN" for a norm, and has it in both.
    return max(0.0 if a == b else abs(float(a) / float(b) - 1) for a, b in pairs)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("FP16") else name for name in AGREE]
)
def test_layouts_train_the_same_thing(name, tmp_path):
    overrides, layouts = AGREE[name]
    points = sweep(tmp_path, *overrides.split())
    reference = points["single"]
    found = {
        layout: [deviation(metric, points[layout], reference) for metric in ("train/loss", "val/loss", "grad/norm")]
        for layout in layouts
    }
    loose = 20 if "fp16" in overrides else 1  # FP16 rounds partial sums of split products differently
    wrong = {k: v for k, v in found.items() if max(v[:2]) > LOSS * loose or v[2] > NORM * loose}
    assert not wrong, f"relative deviation of loss, validation loss and gradient norm: {wrong}"
    # The comparison means nothing if the loss does not move.
    losses = [line["train/loss"] for line in reference if "train/loss" in line]
    assert losses[0] - losses[-1] > 0.1


@pytest.mark.parametrize(
    "overrides",
    [
        "model.norm=layernorm model.activation=gelu model.bias=true model.position=learned model.tie_embeddings=true "
        "model.heads=4 parallel=single,tp2_sp,pp2,zero1",
        "model.kv_heads=2 parallel.recompute=full parallel=single,tp2_sp,zero3",
        "parallel.overlap=true parallel.bucket_mb=0.05 parallel=single,zero1,zero3,pp2_zero1",
        "train.micro_batch=1 parallel=single,dp2,pp2",
        "parallel.cp=2 parallel=single,tp2_sp,pp2,zero3 model.kv_heads=2 parallel.dp=1",
    ],
    ids=[
        "GPT-2 style with tied embeddings",
        "GQA and full recompute",
        "overlap and small buckets",
        "micro-batch 1",
        "context parallelism with TP, PP and ZeRO",
    ],
)
@pytest.mark.slow
def test_layouts_agree_with_other_settings(overrides, tmp_path):
    points = sweep(tmp_path, *overrides.split())
    reference = points.pop("single")
    for layout, metrics in points.items():
        assert deviation("train/loss", metrics, reference) < LOSS, layout
        assert deviation("grad/norm", metrics, reference) < NORM, layout


@pytest.mark.slow
def test_tp4_pp2_runs_on_two_cores(tmp_path):
    points = sweep(tmp_path, "parallel=single,tp4_pp2")
    assert deviation("train/loss", points["tp4_pp2"], points["single"]) < LOSS


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_a_thousand_steps_of_zero_do_not_crash(layout, tmp_path):
    """Megatron-FSDP over gloo's own all-gather dies of a corrupted heap within a few hundred steps."""
    points = sweep(tmp_path, f"parallel={layout}", "train.steps=1000", "train.eval_every=500", "model.layers=2")
    assert points[layout][-1]["step"] == 1000
