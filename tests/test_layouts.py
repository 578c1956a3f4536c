"""Every layout trains the same thing as one process: the whole of the parity protocol, and long runs.

`tests/test_parity.py` has a part of it that every test run can afford.
"""

import json

import pytest
from checkpointed import runner

from parallel import parity

AGREE = {
    "every layout in FP32, and other models, micro-batches and recomputation": "--precision=fp32",
    "every layout in BF16": "--precision=bf16 --case=base",
    "FP16 with dynamic loss scaling": "tp2 pp2 cp2 zero1 zero3 --precision=fp16",
    "overlap and small buckets": "zero1 zero3 pp2_zero1 --precision=fp32 parallel.overlap=true parallel.bucket_mb=0.05",
    "context parallelism with TP, PP and ZeRO, and grouped queries": (
        "tp2_sp pp2 zero3 --precision=fp32 --case=gqa parallel.cp=2"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", AGREE.values(), ids=AGREE)
def test_layouts_train_the_same_thing(words, tmp_path, capfd):
    code = parity.main([*words.split(), f"--folder={tmp_path}", "launch.device=cpu"])
    assert code == 0, capfd.readouterr().out


@pytest.mark.slow
def test_layouts_do_not_drift_apart_in_bf16(tmp_path, capfd):
    words = "tp2 pp2 zero3 --precision=bf16 --steps=200".split()
    code = parity.main([*words, f"--folder={tmp_path}", "launch.device=cpu"])
    assert code == 0, capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_a_thousand_steps_of_zero_do_not_crash(layout, tmp_path):
    """Megatron-FSDP over gloo's own all-gather dies of a corrupted heap within a few hundred steps."""
    run = runner(tmp_path)("long", f"parallel={layout}", "train.steps=1000", "model.layers=2")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 1000 and last["val/loss"] < 4
