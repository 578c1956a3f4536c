"""From what was measured to the cause and what to try: every branch, and where it differs from the claim."""

import pytest

from precision.diagnosis import diagnose, markdown, rose, text

QUIET = [1.0, 1.2, 0.9, 1.1, 1.0, 0.95, 1.05, 1.0, 1.1, 0.9]
RISING = [1.0, 1.1, 0.9, 1.0, 1.1, 1.0, 0.9, 3.0, 15.0, 145.0]
OUTPUT = {
    "direction": "forward", "kind": "output", "module": "decoder.layers.1.mlp.linear_fc2", "layer": 1, "rank": 0,
    "tensor": "output of decoder.layers.1.mlp.linear_fc2", "micro_batch": 0, "nan": True, "largest": 3.0, "trail": [],
}  # fmt: skip
WEIGHT = OUTPUT | {"direction": "weights", "tensor": "decoder.layers.1.mlp.linear_fc2.weight", "micro_batch": None}
TOKENS = {"min": 0, "max": 255, "vocab": 256, "bad": 0, "commonest": 0.1, "longest_run": 3}


def measured(**changes) -> dict:
    """A loss that is not finite in step 50 of a quiet run, with these differences."""
    norms = changes.pop("norms", QUIET)
    found = {
        "step": 50,
        "seen": "the loss is nan",
        "first": OUTPUT,
        "reproduced": True,
        "bad_state": [],
        "largest_weight": [0.3, "output_layer.weight"],
        "spread": [[0.01, "a"], [0.03, "b"]],
        "history": {"grad_norm": norms},
        "lr": 1e-3,
        "loss_scale": {"kind": "none", "now": 1.0, "floor": 1.0, "skipped_in_a_row": 0},
        "at_floor": False,
        "tokens": TOKENS,
        "checkpoint": None,
    }
    return found | changes


FP16 = {"kind": "dynamic", "now": 1.0, "floor": 1.0, "skipped_in_a_row": 5}
# Words of the command line, what was measured, and the kind of cause and the advice that follow.
CASES = {
    "the norm rose, nothing is clipped": ("clip=none", {"norms": RISING}, "diverged", "clip=1.0"),
    "the norm rose, no warm-up": ("schedule.warmup_steps=0", {"norms": RISING}, "diverged", "schedule.warmup_steps=20"),
    "the norm rose all the same": ("optimizer.lr=3e-3", {"norms": RISING}, "diverged", "optimizer.lr=0.001"),
    "weights that are far too large": (
        "clip=none optimizer=sgd optimizer.lr=1e6", {"largest_weight": [1e9, "x"]}, "diverged",
        "clip=1.0 optimizer.lr=0.1",
    ),
    "a quiet run, a module": ("", {}, "module", None),
    "a quiet run, attention": (
        "", {"first": OUTPUT | {"module": "decoder.layers.0.self_attention.core_attention"}}, "module",
        "model.attention=math",
    ),
    "too large for FP16": ("precision=fp16", {"first": OUTPUT | {"nan": False}}, "overflow", "precision=bf16"),
    "NaN after what is nearly too large for FP16": (
        "precision=fp16", {"first": OUTPUT | {"largest": 4e4}}, "overflow", "precision=bf16",
    ),
    "loss scale at its floor": (
        "precision=fp16", {"at_floor": True, "loss_scale": FP16}, "loss scale", "precision=bf16",
    ),
    "a fixed loss scale that is too high": (
        "precision=fp16 precision.loss_scale=65536", {"at_floor": True, "loss_scale": FP16 | {"kind": "fixed"}},
        "loss scale", "precision.loss_scale=dynamic",
    ),
    "not again with the same batch": ("", {"first": None, "reproduced": False}, "passing", "train.on_nan=rollback"),
    "a damaged weight": ("", {"first": WEIGHT}, "damaged", "train.on_nan=rollback checkpoint.every=100"),
    "a damaged weight, with a checkpoint": (
        "", {"first": WEIGHT, "checkpoint": "runs/a/checkpoints/step_00000040"}, "damaged",
        "checkpoint.resume=runs/a/checkpoints/step_00000040",
    ),
    "a weight after rising norms": ("clip=none", {"first": WEIGHT, "norms": RISING}, "diverged", "clip=1.0"),
    "a weight that its format cannot hold": (
        "precision=fp16", {"first": WEIGHT | {"master_is_good": True}}, "rounding", "precision=bf16",
    ),
    "a damaged moment": ("", {"first": WEIGHT | {"direction": "optimizer"}}, "optimizer", "train.on_nan=rollback"),
    "initial weights": (
        "", {"step": 1, "norms": [], "spread": [[0.1, "a"], [3.0, "b"]]}, "initial weights", "model.init_std=0.02",
    ),
    "a bad token id": ("", {"tokens": TOKENS | {"max": 300, "bad": 2}}, "data", "model.vocab=301"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cause_follows_from_what_was_measured(name, cfg_of):
    words, changes, kind, advice = CASES[name]
    report = diagnose(measured(**changes), cfg_of(*words.split()))
    assert report["kind"] == kind, report["because"]
    assert report["advice"] is None if advice is None else report["advice"].startswith(advice), report["advice"]
    assert "\n" not in report["cause"] and f"in step {report['step']}" in report["cause"]
    for page in (text(report), markdown(report)):
        assert all(fork["measured"] in page for fork in report["path"]) and report["because"] in page
    # It can be pasted behind the command that failed.
    cfg_of(*words.split(), *(word for word in (report["advice"] or "").split() if "checkpoint.resume" not in word))


def test_where_the_advice_is_not_the_claims_the_claim_is_named(cfg_of):
    assert diagnose(measured(norms=RISING), cfg_of())["differs"].startswith("Claim 13:")
    assert diagnose(measured(step=1, norms=[], spread=[[0.1, "a"], [3.0, "b"]]), cfg_of())["differs"] is None


def test_every_fork_of_the_claim_is_measured(cfg_of):
    forks = [fork["fork"] for fork in diagnose(measured(), cfg_of())["path"]]
    for fork in ("Gradient or not", "Loss scale", "Learning rate", "Clipping", "Weights", "Token ids in the batch"):
        assert fork in forks


def test_a_norm_has_risen_when_the_last_ones_are_far_above_the_median():
    assert rose(measured(norms=RISING)) > 100 and rose(measured(norms=QUIET)) < 2
    assert rose(measured(norms=[1.0, 2.0])) is None
