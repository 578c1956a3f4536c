"""One run from the command line to what it leaves behind, and what is left when it ends badly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tracking.metrics import AVERAGED, METRICS

REPO = Path(__file__).resolve().parent.parent
SMALL = (
    "train.global_batch=4 train.micro_batch=2 train.seq_len=64 train.sample_length=0 train.eval_sequences=4 "
    "model.layers=2 model.hidden=64 model.ffn_hidden=128 model.heads=4 model.kv_heads=2"
).split()


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """Two steps of what `make train` runs, and what it printed."""
    folder = tmp_path_factory.mktemp("default") / "run"
    words = ["train.steps=3", "train.eval_every=2", "train.sample_length=20", f"hydra.run.dir={folder}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "RANK", "WORLD", "SLURM"))}
    command = [sys.executable, str(REPO / "train.py"), "launch.device=cpu", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_the_first_run_says_that_this_machine_computes_correctly(default_run):
    folder, printed = default_run
    assert "This machine computes correctly" in printed
    assert result(folder)["verdict"].startswith("This machine computes correctly")


def test_a_wrong_result_would_be_noticed(cfg_of, single_rank):
    import torch

    from models import expected
    from parallel import wrap

    cfg = cfg_of()
    chunks = wrap.model_chunks(cfg, torch.device("cpu"))
    assert "computes correctly" in expected.check(cfg, chunks, 0, 1)
    with torch.no_grad():
        chunks[0].module.decoder.layers[1].mlp.linear_fc2.weight.mul_(1.05)
    assert "COMPUTES SOMETHING ELSE" in expected.check(cfg, chunks, 0, 1)


def test_a_run_leaves_metrics_of_every_step_under_their_documented_names(default_run):
    folder, _ = default_run
    found = lines(folder)
    steps = [line for line in found if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["step"] for line in found if "val/loss" in line] == [0, 2, 3]
    tokens = steps[0]["tokens"]
    assert [line["tokens"] for line in steps] == [tokens, 2 * tokens, 3 * tokens]
    every = set(METRICS) - {"val/loss", "val/perplexity", "grad/skipped_spikes"}
    assert every <= set(steps[-1]), every - set(steps[-1])
    assert not {f"{name}_avg" for name in AVERAGED} & set(steps[0]), "the first step is in no average"
    assert all(set(line) - {"step"} <= set(METRICS) for line in found)


def test_a_run_leaves_a_result_and_says_how_to_repeat_it(default_run):
    folder, printed = default_run
    outcome = result(folder)
    assert outcome["status"] == "ok" and outcome["steps"] == 3 and outcome["world_size"] == 1
    assert outcome["loss_final"] == lines(folder)[-2]["train/loss"]
    assert outcome["peak_gib"] > 0.1 and outcome["mfu"] > 0
    assert outcome["run_command"].startswith("python train.py launch.device=cpu train.steps=3")
    assert outcome["sample"]["text"]
    assert printed.rstrip().splitlines()[-1].endswith("report.html")
    assert {"config.yaml", "hydra.yaml", "overrides.yaml"} == {path.name for path in (folder / ".hydra").iterdir()}
    assert (folder / "ranks" / "rank0.log").stat().st_size


def test_a_user_is_told_what_runs_before_the_first_step(default_run):
    _, printed = default_run
    before = printed.partition("step 0/")[0]
    for row in (
        "parameters  3,033,344",
        "ranks",
        "device",
        "peak",
        "data",
        "memory",
        "time  ",
        "attention",
        "W&B",
        "repeat with",
    ):
        assert row in before, row


def test_a_loss_that_is_not_finite_ends_the_run_as_nan(train, tmp_path):
    done = train(
        *SMALL, "train.steps=30", "optimizer=sgd", "optimizer.lr=1e18", "clip=none", "schedule=constant",
        "schedule.warmup_steps=0", "tracking.mode=disabled", "hydra.run.dir=run", timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    outcome = result(tmp_path / "run")
    assert outcome["status"] == "nan"
    assert "rank" in outcome["cause"] and "loss is" in outcome["cause"] and "step" in outcome["cause"]
    assert outcome["steps"] < 30


def test_a_users_own_text_is_trained_on(train, tmp_path):
    text = tmp_path / "texts"
    text.mkdir()
    for i in range(8):
        (text / f"{i}.txt").write_text(f"{i} bottles of beer on the wall, take one down and pass it around\n" * 30)
    done = train(*SMALL, "data=text", f"data.path={text}", "train.steps=2", "hydra.run.dir=run", timeout=120)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["data"]["source"] == str(text)
    few = train(*SMALL, "data=text", f"data.path={text / '0.txt'}", "train.steps=2", "train.seq_len=4096")
    assert few.returncode == 2 and "Too little text" in few.stderr and "Traceback" not in few.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_second_is_told_and_leaves_no_half_run(signum, plain_env, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, str(REPO / "train.py"), *SMALL, f"hydra.run.dir={run}"], cwd=tmp_path,
        env=plain_env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while not (run / ".hydra" / "overrides.yaml").exists() and process.poll() is None:
        time.sleep(0.001)
    time.sleep(0.03)
    process.send_signal(signum)
    said = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 128 + signum
    if run.exists():  # its ranks were being started
        assert said == f"stopped by {signum.name} before the first step ({run / 'result.json'})"
        assert result(run)["status"] == "interrupted" and signum.name in result(run)["cause"]
    else:
        assert said == f"stopped by {signum.name} before anything was started"


STOPS = [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]


@pytest.mark.parametrize("signum", STOPS, ids=lambda s: s.name)
def test_a_run_that_is_stopped_leaves_no_process_and_every_finished_step(signum, plain_env, tmp_path):
    command = [
        sys.executable,
        str(REPO / "train.py"),
        *SMALL,
        "parallel=tp2",
        "train.steps=100000",
        "hydra.run.dir=run",
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=plain_env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, 120)
    time.sleep(3)  # W&B's file may be a second behind when nobody can react to a signal
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(signum)
    process.wait(60)
    wait(lambda: not any(alive(child) for child in family), 30)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    if signum != signal.SIGKILL:
        assert process.returncode in (130, 128 + signum)
        assert result(tmp_path / "run")["status"] == "interrupted"
        assert result(tmp_path / "run")["steps"] == steps[-1]
    (offline,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    read = subprocess.run(
        [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(offline)],
        env=plain_env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert read.returncode == 0 and "train/loss" in read.stdout


def wait(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
