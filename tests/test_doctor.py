"""The NaN doctor: whatever is not finite, wherever it begins, is named; what can go on goes on."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parallel import compose, frozen, launch
from precision.nonfinite import BadBatch, Doctor

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
SMALL = (
    "launch.device=cpu train.steps=8 train.global_batch=8 train.micro_batch=2 train.seq_len=32 train.sample_length=0 "
    "model.layers=4 model.hidden=32 model.ffn_hidden=64 model.heads=4 model.kv_heads=4 schedule.warmup_steps=2 "
    "tracking.mode=disabled data=mock"
).split()
LAYERS = "decoder.layers"
# Twelve faults on two ranks: what is put where, and what has to be named: direction, part of the tensor's name, rank.
FAULTS = {
    "weight under dp2": ("dp2", "weight", f"{LAYERS}.1.mlp.linear_fc1.weight", 1, 2, "weights"),
    "weight under tp2": ("tp2", "weight", f"{LAYERS}.2.mlp.linear_fc2.weight", 1, 1, "weights"),
    "weight under zero3": ("zero3", "weight", f"{LAYERS}.3.self_attention.linear_qkv.weight", 1, 2, "weights"),
    "activation under tp2": ("tp2", "activation", f"{LAYERS}.0.mlp.linear_fc1", 1, 2, "forward"),
    "activation under pp2": ("pp2", "activation", f"{LAYERS}.3.self_attention.linear_qkv", 1, 3, "forward"),
    "activation under zero3": ("zero3", "activation", f"{LAYERS}.2.self_attention.core_attention", 1, 2, "forward"),
    "activation under pp2_vpp2": ("pp2_vpp2", "activation", f"{LAYERS}.2.mlp.linear_fc2", 0, 2, "forward"),
    "activation under cp2": ("cp2", "activation", f"{LAYERS}.1.mlp.linear_fc1", 1, 2, "forward"),
    "gradient under pp2": ("pp2", "gradient", f"{LAYERS}.1.mlp.linear_fc2", 0, 2, "backward"),
    "weight gradient under tp2": (
        "tp2", "weight gradient", f"{LAYERS}.2.self_attention.linear_proj", 1, 2, "backward",
    ),
    "moment under zero1": ("zero1", "exp_avg_sq", f"{LAYERS}.0.mlp.linear_fc2.weight", 1, 3, "optimizer"),
    "reduced gradient under zero1": ("zero1", "reduced", "embedding.word_embeddings.weight", 1, 2, "gone"),
}  # fmt: skip


def prepare(folder: Path, faults: dict) -> None:
    for layout in {fault[0] for fault in faults.values()}:
        cfg, choices, overrides, _ = compose.compose([*SMALL, f"parallel={layout}"])
        frozen.freeze(compose.check(cfg), folder / layout, choices, overrides)
    names = ("layout", "kind", "where", "rank", "step", "direction")
    table = {name: dict(zip(names, fault, strict=True)) for name, fault in faults.items()}
    (folder / "faults.json").write_text(json.dumps(table))


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory):
    """What two ranks, started once, say about every fault."""
    folder = tmp_path_factory.mktemp("faults")
    prepare(folder, FAULTS)
    point = frozen.load(folder / "dp2")
    launch.run(folder, point, [sys.executable, "-u", str(HERE / "doctor_rank.py"), str(folder)])
    said = [json.loads((folder / f"said{rank}.json").read_text()) for rank in range(2)]
    return folder, said


@pytest.mark.parametrize("name", FAULTS)
def test_the_doctor_names_the_place(name, diagnosed):
    folder, said = diagnosed
    _, _, where, rank, step, direction = FAULTS[name]
    report = json.loads((folder / name.replace(" ", "_") / "doctor" / "report.json").read_text())
    first = report["first"]
    assert first["direction"] == direction, report["cause"]
    assert where in first["tensor"] and first["rank"] == rank, report["cause"]
    # A damaged moment shows in the step after the update that uses it.
    assert report["step"] == step + (direction == "optimizer")
    assert said[0][name] == said[1][name] == report["cause"], "the ranks do not agree"
    assert f"rank {rank}" in report["cause"] and where in report["cause"]


def test_the_batch_is_looked_at_before_every_step(single_rank, cfg_of, tmp_path):
    doctor = Doctor(cfg_of(), tmp_path, [], None, None)
    good = [np.arange(2 * 257).reshape(2, 257) % 256 for _ in range(4)]
    doctor.take(1, good)
    for bad, where in ((300, (2, 1, 7)), (-1, (0, 0, 0)), (256, (3, 1, 256))):
        batch = [tokens.copy() for tokens in good]
        batch[where[0]][where[1:]] = bad
        with pytest.raises(BadBatch, match=f"token id {bad} .*micro-batch {where[0]}, sequence {where[1]}, position"):
            doctor.take(2, batch)
    assert (np.load(tmp_path / "doctor" / "batch-rank0.npy") == np.concatenate(batch)).all()


@pytest.mark.slow
def test_a_bad_token_id_is_refused_before_it_reaches_a_device(train_with, tmp_path):
    done = train_with("bad token", "parallel=single")
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome["status"] == "failed" and "Traceback" not in done.stderr
    for part in ("step 3", "token id 300", "model.vocab=256", "rank 0, micro-batch 1, sequence 0, position 5"):
        assert part in outcome["cause"], outcome["cause"]
    assert (tmp_path / "run" / "doctor" / "batch-rank0.npy").exists()


@pytest.mark.slow
def test_a_batch_that_is_left_out_is_counted_and_the_run_goes_on(train_with, tmp_path):
    done = train_with("bad batch", "parallel=dp2", "train.on_nan=skip", code=0)
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome["status"] == "ok" and outcome["left_out"] == 1 and outcome["rollbacks"] == 0
    assert outcome["first_nonfinite_step"] == 3
    steps = metrics(tmp_path / "run")
    assert [step for step, line in steps.items() if step and "train/loss" not in line] == [3]
    assert steps[2]["train/left_out"] == 0 and steps[8]["train/left_out"] == 1
    assert "the loss is nan in step 3" in done.stdout
    report = (tmp_path / "run" / "doctor" / "report.md").read_text()
    assert "output of loss" in report


@pytest.mark.slow
def test_leaving_out_ends_at_its_limit(train_with, tmp_path):
    train_with("diverged", "parallel=single", "train.on_nan=skip", "train.nan_limit=2")
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome["status"] == "nan" and "train.nan_limit=2" in outcome["cause"]
    assert outcome["steps"] == 4  # the steps 3 and 4 were left out


@pytest.mark.slow
def test_a_damaged_moment_is_undone_by_going_back(train_with, tmp_path):
    words = ["parallel=dp2", "checkpoint.every=2"]
    train_with("moment", *words, "train.on_nan=rollback", code=0)
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome["status"] == "ok" and outcome["rollbacks"] == 1 and outcome["left_out"] == 2
    steps = metrics(tmp_path / "run")
    # The update of step 5 spread it, step 6 saw it; both batches are left out from then on.
    assert [step for step, line in steps.items() if step and "train/loss" not in line] == [6]
    assert list(steps) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    report = json.loads((tmp_path / "run" / "doctor" / "report.json").read_text())
    assert report["first"]["direction"] == "optimizer" and "exp_avg_sq" in report["cause"]


@pytest.mark.slow
def test_skipping_cannot_mend_a_damaged_weight_and_says_so(train_with, tmp_path):
    train_with("moment", "parallel=single", "train.on_nan=skip")
    cause = json.loads((tmp_path / "run" / "result.json").read_text())["cause"]
    assert "leaving the step out cannot help" in cause


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "zero3"])
def test_the_saved_batch_is_replayed(layout, train_with, tmp_path, plain_env):
    train_with("bad batch", f"parallel={layout}")
    command = [sys.executable, "-m", "precision.doctor", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=REPO, env=plain_env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (
        "Gradient or not",
        "Token ids in the batch",
        "Replayed from the initial weights: the batch passes",
    ):
        assert part in done.stdout, done.stdout


def test_a_folder_without_a_report_has_nothing_to_replay(tmp_path, plain_env):
    prepare(tmp_path, {"one": ("single", "", "", 0, 0, "")})
    for folder, said in ((tmp_path / "single", "holds no report"), (tmp_path, "is not that of a run")):
        command = [sys.executable, "-m", "precision.doctor", str(folder)]
        done = subprocess.run(command, cwd=REPO, env=plain_env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and said in done.stdout + done.stderr


def metrics(run: Path) -> dict[int, dict]:
    """What is recorded of each step; a step is recorded once."""
    found: dict[int, dict] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        known = found.setdefault(line.pop("step"), {})
        assert not set(known) & (set(line) - {"tokens"}), line
        known |= line
    return found


@pytest.fixture
def train_with(tmp_path, plain_env):
    """`train_with("fault", ...)` runs train.py with a fault in its ranks, in the folder `run`."""

    def run(fault: str, *words: str, code: int = 1) -> subprocess.CompletedProcess[str]:
        small = [word for word in SMALL if word != "data=mock"]
        command = [sys.executable, str(HERE / "faulty_train.py"), fault, *small, *words, "hydra.run.dir=run"]
        done = subprocess.run(command, cwd=tmp_path, env=plain_env, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run
