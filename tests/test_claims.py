"""Claims are judged by what their runs found: every one has its experiment, and its verdict can go either way."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import claims, claims_found
from benchmarks.claims_found import CLAIMS, FAILS, HOLDS
from parallel import compose
from tracking.runs import Run

EXPERIMENTS = sorted(
    path.stem for path in (Path(__file__).resolve().parent.parent / "conf" / "experiment").glob("claim_*.yaml")
)


def run(losses=(3.0,), choices=None, keys=None, lines=(), status="ok", **result) -> Run:
    """A run as a reader sees it, without a folder."""
    made = Run(Path("none"), status=status, result={"val_loss_final": losses[-1]} | result, choices=choices or {})
    made.keys = keys or {}
    made.metrics = lambda: list(lines)
    return made


def test_every_claim_has_its_experiment_and_every_experiment_its_claim():
    assert sorted(claim.experiment for claim in CLAIMS) == EXPERIMENTS


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_experiment_of_a_claim_is_a_legal_run_by_itself(name):
    assert compose.compose([f"experiment={name}"])[0] is not None


def test_bf16_against_fp16_can_come_out_either_way():
    def seeds(name, *found):
        return [run((value,), {"precision": name}, skipped_steps=1) for value in found]

    found, verdict = claims_found.bf16_or_fp16(seeds("bf16", 2.0, 2.01) + seeds("fp16", 2.3, 2.31))
    assert verdict == HOLDS and "FP16 skips 1 steps" in found
    assert claims_found.bf16_or_fp16(seeds("bf16", 2.0, 2.01) + seeds("fp16", 2.0, 2.01))[1].startswith(FAILS)
    assert "FP16 does better" in claims_found.bf16_or_fp16(seeds("bf16", 2.3, 2.31) + seeds("fp16", 2.0, 2.01))[1]


def test_loss_scaling_can_come_out_any_way():
    def three(scaled, unscaled, end):
        lost = {"fp32": 0.0, "fp16": scaled, "fp16_unscaled": unscaled}
        ends = {"fp32": 2.0, "fp16": 2.0, "fp16_unscaled": end}
        return [run((ends[n],), {"precision": n}, lines=[{"amp/underflow_fraction": lost[n]}]) for n in lost]

    assert claims_found.loss_scaling(three(0.01, 0.3, 2.5))[1] == HOLDS
    assert "trains without them" in claims_found.loss_scaling(three(0.01, 0.3, 2.001))[1]
    assert claims_found.loss_scaling(three(0.3, 0.3, 2.001))[1] == FAILS


def test_a_run_that_went_nan_is_the_worst_and_not_the_best():
    points = [
        run((float("nan"),), {"clip": "0.1"}, {"optimizer.lr": 5e-5}, status="nan"),
        run((2.0,), {"clip": "1.0"}, {"optimizer.lr": 3e-4}),
    ]
    assert claims_found.adamw(points)[1].startswith(FAILS)
    points[0] = run((1.5,), {"clip": "0.1"}, {"optimizer.lr": 5e-5})
    assert claims_found.adamw(points)[1] == HOLDS


def test_memory_that_piles_up_is_told_from_memory_that_does_not():
    def grown(last):
        return [run(lines=[{"mem/peak_gib": gib} for gib in (0.5, 1.0, last)], steps=300)]

    assert claims_found.memory(grown(1.5))[1] == HOLDS
    assert claims_found.memory(grown(1.0))[1].startswith(FAILS)


def test_a_name_that_is_no_claim_is_answered_with_those_that_are(capsys):
    assert claims.main(["claim_99"]) == 2
    assert "claim_99 is no claim" in capsys.readouterr().err


def test_a_claim_whose_points_did_not_finish_has_no_verdict(tmp_path):
    assert claims.read(CLAIMS[0], tmp_path / "none") == ("no run", "not measured", False)


def test_a_run_that_went_nan_before_its_first_probe_still_has_a_verdict():
    points = [
        run((2.0,), {"precision": "fp32"}),
        run((2.0,), {"precision": "fp16"}, lines=[{"amp/underflow_fraction": 0.0}]),
        run((math.nan,), {"precision": "fp16_unscaled"}, status="nan"),
    ]
    assert "training suffers" in claims_found.loss_scaling(points)[1]


def test_an_override_that_is_refused_ends_the_claims_and_judges_nothing(tmp_path, capfd):
    assert claims.main(["claim_18_bf16_or_fp16", "train.stepz=4", f"--folder={tmp_path}"]) not in (0, 1)
    assert "was not run to its end" in capfd.readouterr().err and not (tmp_path / "claims.md").exists()


@pytest.mark.slow
def test_a_claim_is_run_and_written_down_and_goes_on_where_it_was(tmp_path, capfd):
    words = ["claim_18_bf16_or_fp16", "train.steps=4", "train.seed=1,2", f"--folder={tmp_path}"]
    assert claims.main(words) == 0
    (row,) = json.loads((tmp_path / "claims.json").read_text())["claims"]
    assert row["found"].startswith("BF16 ") and row["verdict"] in (tmp_path / "claims.md").read_text()
    capfd.readouterr()
    assert claims.main(words) == 0
    assert "started on CPU" not in capfd.readouterr().out
