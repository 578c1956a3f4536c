"""What must hold under a real SLURM of two nodes with two CPUs each: `make slurm-check` starts one and runs this."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
WORDS = [
    *("model=tiny", "launch.device=cpu", "tracking.mode=disabled"),
    *("train.steps=3", "train.global_batch=8", "train.seq_len=64", "train.eval_sequences=8", "train.sample_length=0"),
]
SUBMIT = ["hydra/launcher=submitit_slurm", "cluster.devices_per_node=2", "hydra.launcher.poll_s=0.5"]
SIZES = {"single": 1, "tp2": 2, "tp2_dp2": 4}

pytestmark = pytest.mark.skipif(not shutil.which("sbatch"), reason="run by make slurm-check")


@pytest.fixture
def start(tmp_path: Path, plain_env: dict[str, str]) -> Callable[..., subprocess.Popen]:
    """`start(*command)` runs it in the test's folder, with SLURM in reach; what is left of it goes with the test."""
    env = plain_env | {"SLURM_CONF": os.environ["SLURM_CONF"]}
    started = []

    def run(*command: str, **options) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=env, **pipes | options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()
    subprocess.run(["scancel", "--user", str(os.getuid())], capture_output=True)
    wait_until(lambda: not queue())


def train(*words: str) -> list[str]:
    return [sys.executable, str(REPO / "train.py"), *WORDS, *words]


def resume(folder: Path, *words: str) -> list[str]:
    return [sys.executable, str(REPO / "train.py"), f"resume={next(folder.glob('runs/sweeps/*'))}", *words]


def queue() -> list[str]:
    asked = ["squeue", "--noheader", "--format=%i %j %T"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()


def wait_until(true: Callable[[], object], at_most_s: float = 60) -> None:
    until = time.monotonic() + at_most_s
    while not true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)


def points(folder: Path) -> dict[str, Path]:
    """The folder of each point by its layout."""
    found = sorted(folder.glob("runs/sweeps/*/*/resolved.yaml"))
    return {path.parent.name.split("_tiny_")[1].split("_fp32_")[0]: path.parent for path in found}


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def check_three_points(folder: Path) -> None:
    """All points are there, ran on the nodes their size asks for, and computed the same."""
    found = points(folder)
    results = {layout: result(found[layout]) for layout in SIZES}
    assert [(r["status"], r["world_size"]) for r in results.values()] == [("ok", size) for size in SIZES.values()]
    hosts = {layout: (found[layout] / "ranks" / "rank.hosts").read_text().split() for layout in SIZES}
    assert [len(set(names)) for names in hosts.values()] == [1, 1, 2]
    assert [names.count(names[0]) for names in hosts.values()] == [1, 2, 2]
    for r in results.values():
        assert r["val_loss_final"] == pytest.approx(results["single"]["val_loss_final"], abs=1e-4)
        assert r["val_loss_final"] < r["val_loss_start"]


def test_srun_runs_points_of_three_sizes_in_one_allocation(start, tmp_path):
    sweep = train("-m", "launch=srun", f"parallel={','.join(SIZES)}")
    salloc = start("salloc", "--quiet", "--ntasks=4", *sweep)
    out, _ = salloc.communicate(timeout=300)
    assert salloc.returncode == 0, out
    check_three_points(tmp_path)


def test_submitit_runs_points_of_three_sizes_as_a_job_each(start, tmp_path):
    sweep = start(*train("-m", *SUBMIT, f"parallel={','.join(SIZES)}"))
    out, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, out
    check_three_points(tmp_path)
    asked = [next(folder.glob("slurm/*_submission.sh")).read_text() for folder in points(tmp_path).values()]
    lines = [sorted(line for line in text.splitlines() if "nodes=" in line or "-per-node=" in line) for text in asked]
    assert lines == [[f"#SBATCH --nodes={n}", f"#SBATCH --ntasks-per-node={p}"] for n, p in ((1, 1), (1, 2), (2, 2))]


def test_an_illegal_point_is_refused_before_any_job(start, tmp_path):
    sweep = start(*train("-m", *SUBMIT, "parallel=single,tp2", "model.heads=3"))
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 2 and "Nothing was started:" in out and "Traceback" not in out
    assert not queue() and not points(tmp_path)


def test_jobs_that_slurm_refuses_are_told_in_a_sentence_and_recorded(start, tmp_path):
    words = train("-m", *SUBMIT, "parallel=single,tp2", "hydra.launcher.partition=nowhere")
    sweep = start(*words)
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 1 and "invalid partition" in out.lower() and "Traceback" not in out, out
    assert {result(folder)["status"] for folder in points(tmp_path).values()} == {"failed"}


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_sweep_cancels_its_jobs(start, tmp_path, signum, code):
    sweep = start(*train("-m", *SUBMIT, "parallel=tp2,tp2_dp2,single", "train.steps=100000"))
    wait_until(lambda: list(tmp_path.glob("runs/sweeps/*/*/metrics.jsonl")))
    sweep.send_signal(signum)
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == code and "Traceback" not in out, out
    assert not queue()
    assert {result(folder)["status"] for folder in points(tmp_path).values()} == {"interrupted"}


def test_a_sweep_that_loses_its_terminal_leaves_its_jobs_running(start, tmp_path):
    sweep = start(*train("-m", *SUBMIT, "parallel=tp2", "train.steps=100000"))
    wait_until(lambda: list(tmp_path.glob("runs/sweeps/*/*/metrics.jsonl")))
    sweep.send_signal(signal.SIGHUP)
    sweep.communicate(timeout=60)
    assert [line.split()[2] for line in queue()] == ["RUNNING"]
    # Continuing the sweep finds the job instead of starting the point again.
    again = start(*resume(tmp_path))
    assert any("is in the queue already" in line for line in again.stdout)
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert result(points(tmp_path)["tp2"])["status"] == "interrupted" and not queue()


def test_a_job_killed_by_slurm_is_recorded_with_its_cause(start, tmp_path):
    sweep = start(*train("-m", *SUBMIT, "parallel=tp2", "train.steps=100000"))
    wait_until(lambda: list(tmp_path.glob("runs/sweeps/*/*/metrics.jsonl")))
    subprocess.run(["scancel", queue()[0].split()[0]], check=True)
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 1 and "interrupted: SLURM ended job" in out, out
    assert result(points(tmp_path)["tp2"])["status"] == "interrupted"


@pytest.mark.parametrize(("asked", "gpus"), [(["--gpus-per-node=2"], 2), (["--gpus-per-node=fake:1"], 1), ([], 0)])
def test_the_gpus_of_an_allocation_are_known_on_the_login_node(start, asked, gpus):
    code = "import sys; sys.path.insert(0, sys.argv[1]); from parallel import slurm; print(slurm.allocation())"
    job = start("salloc", "--quiet", "--nodes=2", *asked, sys.executable, "-c", code, str(REPO))
    out, _ = job.communicate(timeout=60)
    assert f"hosts=('virtual1', 'virtual2'), cpus=(1, 1), gpus={gpus})" in out, out


def test_a_sweep_left_in_the_queue_is_waited_for_later(start, tmp_path):
    sweep = start(*train("-m", *SUBMIT, "hydra.launcher.wait=false", "parallel=single,tp2"))
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 0 and "2 jobs are in the queue" in out and len(queue()) == 2, out
    later = start(*resume(tmp_path, "hydra.launcher.wait=true"))
    out, _ = later.communicate(timeout=200)
    assert later.returncode == 0 and out.count("is in the queue already") == 2, out
    assert [result(folder)["status"] for folder in points(tmp_path).values()] == ["ok", "ok"]


def test_ranks_under_srun_end_in_every_way_as_they_do_on_one_machine(tmp_path):
    """The tests of launching, with ranks that are tasks of a step."""
    command = ["salloc", "--quiet", "--ntasks=4", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--basetemp={tmp_path / 'launch'}", str(REPO / "tests" / "test_launch.py")]
    done = subprocess.run(command, cwd=REPO, env=os.environ | {"LAUNCH": "srun"}, capture_output=True, text=True)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-8000:]
