"""Joining ranks that torchrun or SLURM started: one run folder for all, and refusals that are said once."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.attach import attached

HERE = Path(__file__).resolve().parent
RANK = str(HERE / "attach_rank.py")
TRAIN = str(HERE.parent / "train.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(tmp_path, plain_env):
    """Start one process of a job in the test's own folder."""
    processes = []

    def run(*command: str, **env: str) -> subprocess.Popen:
        env = plain_env | {"PYTHONPATH": str(HERE.parent)} | env
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=env, **options))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def torchrun(start):
    def run(*arguments: str) -> subprocess.Popen:
        return start(sys.executable, "-m", "torch.distributed.run", *arguments)

    return run


def slurm_tasks(start, *overrides: str) -> list[subprocess.Popen]:
    """Two tasks of one step, as srun starts them."""
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    job |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1"}
    job |= {"MASTER_PORT": str(free_port())}
    tasks = ({"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2))
    return [start(sys.executable, RANK, *overrides, **job, **task) for task in tasks]


def only_run(folder: Path) -> Path:
    runs = [path.parent for path in folder.glob("runs/*/*/resolved.yaml")]
    assert len(runs) == 1, "every rank must work in the same folder"
    return runs[0]


def check_ranks(run_dir: Path, local_world_size: int) -> None:
    for rank in range(2):
        seen = json.loads((run_dir / f"seen{rank}.json").read_text())
        assert (seen["RANK"], seen["WORLD_SIZE"], seen["sum"]) == (str(rank), "2", 2.0)
        assert seen["LOCAL_WORLD_SIZE"] == str(local_world_size)
        assert seen["threads"] == max(1, len(os.sched_getaffinity(0)) // local_world_size)
        # On one machine only the loopback interface is sure to work; between machines it can't.
        assert seen["gloo"] == ("lo" if local_world_size == 2 else None)
    assert "this is rank 1" in (run_dir / "ranks" / "rank1.log").read_text()


def test_torchrun_on_one_machine(torchrun, tmp_path):
    job = torchrun("--standalone", "--nproc-per-node=2", RANK, "parallel=tp2", "train.steps=7")
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    run_dir = only_run(tmp_path)
    check_ranks(run_dir, 2)
    assert "this is rank 0" in out and "this is rank 1" not in out
    assert "steps: 7" in (run_dir / "resolved.yaml").read_text()


def test_torchrun_on_two_machines_fills_in_data_parallelism(torchrun, tmp_path):
    where = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    jobs = [torchrun(*where, "--rdzv-id=test", "--local-addr=127.0.0.1", RANK, "parallel=dp") for _ in range(2)]
    for job in jobs:
        _, err = job.communicate(timeout=100)
        assert job.returncode == 0, err
    run_dir = only_run(tmp_path)
    check_ranks(run_dir, 1)
    assert "dp: 2" in (run_dir / "resolved.yaml").read_text()


def test_slurm_tasks(start, tmp_path):
    for task in slurm_tasks(start, "parallel=tp2"):
        _, err = task.communicate(timeout=100)
        assert task.returncode == 0, err
    check_ranks(only_run(tmp_path), 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["parallel=tp2_pp2"], "needs 4 ranks"),
        (["-m", "parallel=tp2,pp2"], "without torchrun or srun"),
    ],
)
def test_what_cannot_run_is_refused_by_rank_0_alone(start, tmp_path, words, sentence):
    tasks = slurm_tasks(start, *words)
    ended = [task.communicate(timeout=100) for task in tasks]
    assert all(task.returncode == 2 for task in tasks)
    assert sentence in ended[0][1] and "Traceback" not in ended[0][1]
    assert ended[1][0] + ended[1][1] == ""
    assert not list(tmp_path.glob("runs/*/*/resolved.yaml"))


def test_a_refusal_under_torchrun_is_a_failure(torchrun):
    job = torchrun("--standalone", "--nproc-per-node=2", RANK, "parallel=tp2_pp2")
    _, err = job.communicate(timeout=100)
    assert job.returncode != 0 and err.count("needs 4 ranks") == 1


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}, True),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, False),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            False,
        ),
    ],
)
def test_a_batch_script_and_a_shell_inside_a_step_are_no_ranks(monkeypatch, env, expected):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "RANK", "WORLD_SIZE", "MASTER_")):
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert attached() is expected


def ended(folder: Path) -> tuple[str, str]:
    found = json.loads((only_run(folder) / "result.json").read_text())
    return found["status"], found["cause"]


@pytest.mark.slow
def test_ranks_of_torchrun_keep_to_the_time_limit_and_leave_a_checkpoint(torchrun, tmp_path):
    words = ["parallel=dp2", "train.steps=100000", "train.timeout_s=30", "checkpoint.every=50000"]
    job = torchrun("--standalone", "--nproc-per-node=2", TRAIN, *words)
    _, err = job.communicate(timeout=200)
    assert job.returncode != 0, err
    status, cause = ended(tmp_path)
    assert status == "timeout" and cause.startswith("not finished after train.timeout_s=30; ranks 0, 1 in 'step ")
    assert list(only_run(tmp_path).glob("checkpoints/step*"))


BROKEN_RANK = """
import os, runpy, sys
from data import batches
if os.environ["RANK"] == "1":
    batches.Batches.step = lambda self, index: 1 / 0
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_the_result_of_a_torchrun_names_the_rank_that_failed_first(torchrun, tmp_path):
    """Rank 0 itself sees lost peers only, or a signal."""
    program = tmp_path / "broken.py"
    program.write_text(BROKEN_RANK)
    job = torchrun("--standalone", "--nproc-per-node=2", str(program), TRAIN, "parallel=dp2")
    job.communicate(timeout=200)
    status, cause = ended(tmp_path)
    assert status == "failed" and cause.startswith("rank 1: ZeroDivisionError")
