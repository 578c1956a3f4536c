"""The planner: what a point needs is known before anything starts, from the program itself."""

import json
import subprocess
import sys

import pytest

from planner.__main__ import main
from tests.conftest import REPO


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict:
    """What tests/planned.py finds; one process for all, since each takes seconds to import PyTorch."""
    command = [sys.executable, "-m", "tests.planned"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("cluster=a100_80g_x8 cluster.memry_gb=3", "did you mean cluster.memory_gb?"),
        ("cluster=a100_80g_x8 cluster.network_gb_s=-1", "cluster.network_gb_s=-1.0 of cluster=a100_80g_x8"),
        ("cluster=a100_80g_x8 cluster.nvlink_gb_s=null", "cluster.nvlink_gb_s has no value"),
        ("cluster=a100_80g_x8 parallel=tp2 parallel.tp=3", "is not divisible by parallel.tp=3"),
        ("cluster=a100_80g_x8 parallel.pp=16 model.layers=16", "take cluster.nodes=2"),
        ("cluster=a100_80g_x8 precision=bf16 cluster.peak_tflops.bf16=null", "peak_tflops"),
    ],
)
def test_what_cannot_be_planned_is_answered_by_a_sentence(words, sentence, capsys):
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("Nothing was planned:") and sentence in said and "Traceback" not in said


def test_few_layers_and_micro_batches_tell_what_the_whole_step_does(planned):
    for words, found in planned["scaled"].items():
        (short, whole), (state, whole_state) = found["peak"], found["state"]
        # What is neither is a handful of scalars; each micro-batch keeps its loss of 4 bytes.
        assert {**state, "other": 0} == {**whole_state, "other": 0}, words
        assert abs(whole - short) <= 4 * 24, words
        assert found["flops"][0] == found["flops"][1], words


def test_model_state_is_what_arithmetic_says(planned):
    stages = planned["13b"]["stages"]
    kinds = ("parameters", "gradients", "master weights", "moments")
    state = sum(stage["state"][kind] for stage in stages for kind in kinds) / len(stages)
    assert state == pytest.approx(planned["13b"]["state_by_formula"], rel=5e-4)


def test_bytes_over_tensor_parallel_links_are_what_arithmetic_says(planned):
    # Sequence parallelism: each of 20 layers gathers four times (twice forwards, twice backwards for the weights'
    # gradients) and reduces four times, [4096, 1, 5120] in BF16; a ring of four sends three quarters.
    layers = 20 * (4 + 2 + 4) * 0.75 * 4096 * 5120 * 2 * 1024
    assert planned["13b"]["bytes_per_step"]["tp"] == pytest.approx(layers, rel=0.04)


def test_out_of_memory_is_known_before_the_launch(planned):
    """Row 15 of the field's problems."""
    assert planned["13b"]["fits"] and not planned["175b"]["fits"]
    assert planned["175b"]["margin_gib"] < -300


def test_mfu_names_its_peak_and_both_rules(planned):
    """Row 6 of the field's problems."""
    found = planned["13b"]
    assert found["peak_flops"] == 312e12
    for rule, token in found["flops_per_token"].items():
        assert found["mfu"][rule] == pytest.approx(found["tokens_per_s_per_device"] * token / 312e12)
    assert 0.3 < found["mfu"]["causal"] < found["mfu"]["full"] < 0.75


def test_the_parts_of_a_step_add_up(planned):
    step = planned["13b"]["step"]
    parts = step["compute"] + step["bubble"] + step["optimizer"] + step["offload"] + sum(step["exposed"].values())
    assert parts == pytest.approx(step["total"])


@pytest.mark.slow
def test_the_dry_run_allocates_and_sends_what_a_real_run_does():
    """34 configurations over all layouts and formats against real gloo ranks."""
    command = [sys.executable, "-m", "benchmarks.dry_run", "write=false"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "planned" in line]
    assert len(lines) >= 34 and not [line for line in lines if "DIFFERS" in line or "MORE THAN 3 %" in line]
