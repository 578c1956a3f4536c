"""Every layout trains the same thing as one process, and the protocol that says so notices when one does not."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from parallel import agreement, parity, parity_points
from parallel.agreement import Deviation
from parallel.parity_points import Point
from parallel.parity_table import markdown
from tracking import history

REPO = Path(__file__).resolve().parent.parent
STEPS = 8


@pytest.fixture(scope="module")
def protocol(tmp_path_factory):
    """Layouts with micro-batches of 1 against one process with micro-batches of 2; the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("parity")
    command = [sys.executable, "-m", "parallel.parity", "tp2_sp", "pp2", "zero3", "--precision=fp32", "--case=micro_1"]
    command += [f"--steps={STEPS}", f"--folder={folder}", f"--markdown={folder / 'table.md'}", "launch.device=cpu"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def found(folder: Path) -> dict[str, Point]:
    """Points of a protocol by the name of their layout."""
    points = [Point(**json.loads(line)) for line in (folder / "found.jsonl").read_text().splitlines()]
    return {point.layout: point for point in points}


def metric(folder: Path, layout: str, name: str) -> list[float]:
    """A metric of a run that `protocol` made, step by step."""
    lines = history.read(folder / f"fp32_micro_1_{layout}")
    return [line[name] for line in lines if name in line]


def test_the_table_has_the_deviations_of_every_layout(protocol):
    folder, printed = protocol
    points = found(folder)
    assert list(points) == ["single", "tp2_sp", "pp2", "zero3"]
    table = (folder / "table.md").read_text()
    for name in ("tp2_sp", "pp2", "zero3"):
        loss, norm, weights = points[name].found
        assert 0 <= loss <= 1e-5 and 0 <= norm <= 1e-4 and 0 <= weights <= 1e-4
        assert f"{norm:.1e}  {weights:9.1e}  ok" in printed and f"{norm:.1e} | {weights:.1e} |" in table
    assert "3 of 3 agree" in printed
    # Two layouts add in different orders, so a deviation of nothing at all would mean that nothing was compared.
    assert max(max(points[name].found) for name in points if name != "single") > 0


def test_the_loss_does_not_change_with_tensor_parallelism(protocol):
    ours, reference = (metric(protocol[0], f"{name}", "train/loss") for name in ("tp2_sp", "reference"))
    assert len(ours) == STEPS and ours == pytest.approx(reference, rel=1e-5)
    assert reference[0] - reference[-1] > 0.1, "the model learns nothing, so every loss would do"


def test_zero3_does_not_train_differently(protocol):
    for name, tolerance in (("train/loss", 1e-5), ("val/loss", 1e-5), ("grad/norm", 1e-4)):
        ours, reference = (metric(protocol[0], f"{layout}", name) for layout in ("zero3", "reference"))
        assert ours == pytest.approx(reference, rel=tolerance), name


def test_the_loss_is_neither_missing_nor_minus_one_on_the_first_rank_of_a_pipeline(protocol):
    losses = metric(protocol[0], "pp2", "train/loss")
    assert len(losses) == STEPS and all(1 < loss < 7 for loss in losses)


def test_the_gradient_norm_is_not_inflated_by_tensor_parallelism(protocol):
    ours, reference = (metric(protocol[0], f"{name}", "grad/norm") for name in ("tp2_sp", "reference"))
    assert len(ours) == STEPS and ours == pytest.approx(reference, rel=1e-4)


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2", "zero3"])
def test_the_validation_loss_is_the_same_number_under_every_layout_and_micro_batch(layout, protocol):
    ours, reference = (metric(protocol[0], name, "val/loss") for name in (layout, "reference"))
    assert len(ours) == 2 and ours == pytest.approx(reference, rel=1e-6)
    perplexities = metric(protocol[0], layout, "val/perplexity")
    assert perplexities == pytest.approx([math.exp(loss) for loss in ours]) and perplexities[1] < perplexities[0]


def broken(folder: Path, *layouts: str) -> tuple[int, dict[str, Point]]:
    """The protocol with the mistakes of broken_rank.py."""
    entry = [sys.executable, "-u", str(REPO / "tests" / "broken_rank.py")]
    words = [*layouts, "--precision=fp32", "--steps=3", f"--folder={folder}", "launch.device=cpu"]
    return parity.main(words, entry), found(folder)


@pytest.mark.slow
def test_a_mistake_of_a_layout_makes_the_command_fail_and_is_shown_where_it_is(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    code, points = broken(tmp_path, "tp2", "dp2", "pp2", "tp2_sp")
    assert code == 1
    assert [word.rpartition(" ")[0] for word in points["tp2"].failed] == ["gradient norm 1.0e-02 >"]
    assert [word.split(" ")[0] for word in points["dp2"].failed] == ["loss", "gradient", "final"]
    assert points["pp2"].failed[-1].startswith("final weights")
    assert not any(word.startswith("gradient") for word in points["pp2"].failed)
    assert points["tp2_sp"].failed == []
    assert "1 of 4 agree" in capfd.readouterr().out


@pytest.mark.slow
def test_a_layout_that_dies_is_told_with_its_cause_and_the_others_are_compared(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    code, points = broken(tmp_path, "zero1", "tp2_sp")
    printed = capfd.readouterr().out
    assert code == 1 and "no such gradient" in printed and "1 of 2 agree" in printed
    assert points["tp2_sp"].failed == []


def test_what_is_missing_or_not_finite_is_no_agreement():
    reference = [{"step": 1, "train/loss": 2.0, "grad/norm": math.nan}]
    of = agreement.of_metrics
    assert of(reference, reference, "train/loss", "grad/norm") == 0
    assert of([{"step": 1, "train/loss": 2.002, "grad/norm": math.nan}], reference, "train/loss") == pytest.approx(1e-3)
    for wrong in ([], [{"step": 1}], [{"step": 1, "train/loss": math.nan}], [{"step": 1, "train/loss": math.inf}]):
        assert of(wrong, reference, "train/loss") == math.inf
    assert of([{"step": 1}], [{"step": 1}], "train/loss") == math.inf
    assert Deviation(1e-6, math.nan, 0).beyond(agreement.FULL) == ["gradient norm nan > 1e-04"]


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["tp3"], "layout tp3 does not exist: there are cp2"),
        (["tp2", "--case=other"], "case other does not exist"),
        (["tp2", "--precision=fp31"], "precision fp31 does not exist"),
        (["tp2", "model.heads=3"], "the reference single: model.hidden=64 is not divisible by model.heads=3"),
        (["tp2", "model.haeds=4"], "did you mean model.heads"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(words, sentence, capsys, tmp_path):
    assert parity.main([*words, f"--folder={tmp_path}"]) == 2
    assert sentence in capsys.readouterr().err


def test_an_illegal_layout_is_listed_with_its_reason(tmp_path):
    args = parity._parser().parse_intermixed_args(["tp4_pp2", "tp2", "--case=gqa", "--precision=fp32"])
    points = {point.layout: point for point in parity._plan(args, tmp_path)}
    assert points["tp4_pp2"].problems == ["model.kv_heads=2 is not divisible by parallel.tp=4: take parallel.tp=2."]
    assert not points["tp2"].problems and points["tp2"].reference == points["single"].folder
    assert "| `tp4_pp2` |  | not legal |" in markdown(list(points.values()))


def test_without_words_every_option_of_conf_parallel_is_compared():
    (precision, case, layouts), *others = parity_points.wanted([], [], ["fp32"])
    assert (precision, case) == ("fp32", "base") and len(others) == len(parity_points.CASES) - 1
    assert set(layouts) == {file.stem for file in (REPO / "conf" / "parallel").glob("*.yaml")}
