"""Sweeps with real ranks, and what people report of sweeps elsewhere: points that end badly, leak or collide."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parent.parent
SMALL = (
    "launch.device=cpu train.global_batch=4 train.micro_batch=2 train.seq_len=64 train.sample_length=0 "
    "train.eval_sequences=4 model.layers=2 model.hidden=64 model.ffn_hidden=128 model.heads=4 model.kv_heads=2"
).split()
LONG = "train.steps=1000000"

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path, plain_env: dict[str, str]):
    """`start("parallel=tp2,pp2")` starts a sweep of small models; what still runs is killed after the test."""
    parents = []

    def run(*words: str) -> subprocess.Popen:
        command = [sys.executable, str(REPO / "train.py"), "-m", *SMALL, *words]
        with (tmp_path / f"console{len(parents)}").open("wb") as console:
            parent = subprocess.Popen(command, cwd=tmp_path, env=plain_env, stdout=console, stderr=subprocess.STDOUT)
        parents.append(parent)
        return parent

    yield run
    for parent in parents:
        if parent.poll() is None:
            parent.kill()
            parent.wait()


def ranks(folder: Path, point: str = "") -> list[psutil.Process]:
    """The rank processes of a sweep, or of one of its points."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--rank" in words and str(folder) in words[-1] and f"/{point}" in words[-1]:
            found.append(process)
    return found


def sweep_folders(tmp_path: Path, count: int = 1) -> list[Path]:
    """The folders of the sweeps, once there are as many."""

    def found() -> list[Path]:
        folders = [file.parent for file in sorted(tmp_path.glob("runs/sweeps/*/sweep.json"))]
        return folders if len(folders) == count else []

    return wait(found)


def wait(condition, seconds: float = 120):
    """What `condition` gives, once it gives something."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)
    return found


def trains(folder: Path, number: int) -> Path | None:
    """The run folder of a point that has made its first steps."""
    for file in folder.glob(f"{number}_*/metrics.jsonl"):
        if "train/loss" in file.read_text():
            return file.parent
    return None


def statuses(folder: Path) -> list[str]:
    """How the points ended, by result.json."""
    points = json.loads((folder / "sweep.json").read_text())["points"]
    files = [folder / point["folder"] / "result.json" for point in points]
    return [json.loads(file.read_text())["status"] if file.exists() else "missing" for file in files]


def test_one_point_diverges_one_hangs_one_is_killed_and_the_sweep_is_finished_later(start, tmp_path):
    """A second point that is killed or frozen, or that dies with the first; a sweep that cannot be resumed."""
    points = [
        "parallel=single train.steps=3",
        "parallel=tp2 train.steps=20 optimizer=sgd optimizer.lr=1e30 clip=none",
        f"parallel=dp2 {LONG} train.timeout_s=60",
        f"parallel=pp2 {LONG}",
        "parallel=single train.steps=4",
    ]
    words = [f"hydra.sweeper.pairs={json.dumps(points)}"]
    parent = start(*words)
    (folder,) = sweep_folders(tmp_path)
    wait(lambda: trains(folder, 2))
    hangs = ranks(folder, "2_")[-1]
    hangs.send_signal(signal.SIGSTOP)
    wait(lambda: trains(folder, 3))
    assert not hangs.is_running(), "a hanging rank outlived its point"
    ranks(folder, "3_")[-1].kill()
    assert parent.wait(120) == 1
    assert statuses(folder) == ["ok", "nan", "timeout", "failed", "ok"]
    printed = (tmp_path / "console0").read_text()
    assert "5 points: 2 ok" in printed and "killed by SIGKILL" in printed and "train.timeout_s=60" in printed
    assert not ranks(folder)
    # Two of them are made shorter: new configurations, so new points.
    shorter = [point.replace(LONG, "train.steps=2") for point in points]
    again = start(f"hydra.sweeper.pairs={json.dumps(shorter)}", f"resume={folder}")
    assert again.wait(240) == 1
    assert "2 of 5 points are done already, 3 are left to run" in (tmp_path / "console1").read_text()
    assert statuses(folder) == ["ok", "nan", "timeout", "failed", "ok", "ok", "ok"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_a_sweep_that_is_stopped_and_the_same_command_finishes_it(start, tmp_path, signum):
    """Ctrl-C or kill leaves ranks behind that hold devices."""
    words = ["parallel=single,tp2", "train.steps=200", "tracking.mode=disabled"]
    parent = start(*words)
    (folder,) = sweep_folders(tmp_path)
    wait(lambda: trains(folder, 1))
    running = ranks(folder)
    assert len(running) == 2
    parent.send_signal(signum)
    code = parent.wait(60)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[signum]
    assert not psutil.wait_procs(running, timeout=15)[1]
    assert statuses(folder) == ["ok", "missing" if signum == signal.SIGKILL else "interrupted"]
    assert start(*words, "resume=true").wait(240) == 0
    printed = (tmp_path / "console1").read_text()
    assert statuses(folder) == ["ok", "ok"] and "1 of 2 points are done already" in printed


def test_two_sweeps_at_the_same_time_share_neither_folder_nor_port(start, tmp_path):
    """Port 29500 in use; one output folder and .hydra for each rank, or one for two runs."""
    both = [start("parallel=tp2,dp2", "train.steps=3") for _ in range(2)]
    assert [parent.wait(240) for parent in both] == [0, 0]
    folders = sweep_folders(tmp_path, 2)
    assert [statuses(folder) for folder in folders] == [["ok", "ok"]] * 2
    for run in (run for folder in folders for run in folder.glob("[01]_*")):
        assert len(list(run.rglob(".hydra"))) == 1
        assert {log.name for log in (run / "ranks").glob("*.log")} == {"rank0.log", "rank1.log"}
    assert len(list(tmp_path.rglob("resolved.yaml"))) == 4


def test_every_point_starts_afresh_whatever_ran_before_it(start, tmp_path):
    """State that leaks from point to point: peak memory, random numbers, environment, process groups."""
    alone = start("parallel=single", "train.steps=3", "hydra.sweep.dir=alone")
    assert alone.wait(120) == 0
    after = start("parallel=tp2,single", "model.layers=4,2", "train.steps=3", "hydra.sweep.dir=after")
    assert after.wait(240) == 0
    same = json.loads(next((tmp_path / "alone").glob("0_*/result.json")).read_text())
    last = json.loads(next((tmp_path / "after").glob("3_*/result.json")).read_text())
    assert last["config_hash"] == same["config_hash"]
    assert (last["loss_final"], last["val_loss_final"]) == (same["loss_final"], same["val_loss_final"])
    assert last["peak_gib"] == pytest.approx(same["peak_gib"], rel=0.2)
