"""Starting ranks: what they are given, what is told of their end, and that nothing is left however it comes about."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MARK = "TRIPOD_TEST_RUN"
# make slurm-check runs all of this once more with the ranks as tasks of a SLURM step.
ON_SLURM = os.environ.get("LAUNCH") == "srun"


class Job:
    """One parent with its ranks, found again by a variable that all their descendants inherit."""

    def __init__(self, run_dir: Path, env: dict[str, str], scenario: str, *arguments, **options):
        self.dir, self.mark = run_dir, uuid.uuid4().hex
        run_dir.mkdir(exist_ok=True)
        (run_dir / "runs").mkdir(exist_ok=True)
        command = [sys.executable, str(HERE / "launch_parent.py"), str(run_dir), scenario, *map(str, arguments)]
        env = env | {"PYTHONPATH": str(HERE.parent), MARK: self.mark}
        # Python started with SIGINT ignored (a shell's background job) goes on ignoring it.
        listen = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | listen | options
        self.parent = subprocess.Popen(command, env=env, cwd=run_dir, **options)

    def wait_for(self, *names: str) -> None:
        until = time.monotonic() + 60
        while not all((self.dir / name).exists() for name in names):
            assert self.parent.poll() is None, self.parent.communicate()
            assert time.monotonic() < until, f"waited in vain for {names}"
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        out, err = self.parent.communicate(timeout=60)
        return self.parent.returncode, (out or b"").decode(), (err or b"").decode()

    def left(self) -> list[int]:
        """Processes of this job that are still there; those just killed get a moment to go."""
        until = time.monotonic() + (20 if ON_SLURM else 5)  # tasks give an orphaned rank its time to close
        while (pids := list(self._pids())) and time.monotonic() < until:
            time.sleep(0.05)
        return pids

    def _pids(self):
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{MARK}={self.mark}".encode() in environ.read_bytes():
                    yield int(environ.parent.name)
            except OSError:
                continue

    def pid_of(self, rank: int) -> int:
        return next(pid for pid in self._pids() if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text())

    def log(self, rank: int) -> str:
        return (self.dir / "ranks" / f"rank{rank}.log").read_text()

    def result(self) -> dict:
        return json.loads((self.dir / "result.json").read_text())


@pytest.fixture
def start(tmp_path, plain_env):
    """`start("scenario", world_size, timeout_s, grace_s)` is a running Job."""
    jobs = []

    def run(scenario: str, *arguments, name: str = "run", env: dict[str, str] | None = None, **options) -> Job:
        jobs.append(Job(tmp_path / name, plain_env | (env or {}), scenario, *arguments, **options))
        return jobs[-1]

    yield run
    for job in jobs:
        for pid in job._pids():
            os.kill(pid, signal.SIGKILL)
        job.parent.wait()


def test_ranks_get_their_environment_and_one_log_each(start):
    job = start("ok", 2, env={"OMP_NUM_THREADS": "", "TORCHELASTIC_RUN_ID": "stale"})
    code, out, err = job.end()
    assert code == 0 and out.endswith("parent: done\n")
    ranks = [json.loads((job.dir / f"environment{rank}").read_text()) for rank in range(2)]
    for rank, env in enumerate(ranks):
        own = [env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
        assert own == [str(rank), str(rank), "2", "2"]
        assert env["CUDA_VISIBLE_DEVICES"] == "" and env["GLOO_SOCKET_IFNAME"] == "lo"
        assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert env["FROM_PARALLEL_ENV"] == "yes" and "TORCHELASTIC_RUN_ID" not in env
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"]
    # The console has rank 0 and nobody else; the logs have everything, C++ and stderr too.
    assert "rank 0 of 2, terminal False\n" in out and "rank 0 from below Python\n" in out and "rank 1" not in out + err
    assert "rank 0 to stderr\n" in err
    for rank in range(2):
        for words in (f"rank {rank} of 2", f"rank {rank} to stderr", f"rank {rank} from below Python"):
            assert words in job.log(rank)
    assert not job.left()


@pytest.mark.skipif(ON_SLURM, reason="what comes through srun comes from no terminal")
def test_a_terminal_stays_a_terminal_and_the_log_stays_readable(start):
    seen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    outputs = []
    for scenario in ("ok", "progress"):
        job = start(scenario, 1, name=scenario, stdout=terminal, stderr=terminal)
        assert job.parent.wait(30) == 0
        outputs.append(os.read(seen, 100000).decode())
    assert "terminal (99, 33)" in outputs[0]
    assert "\r\x1b[2K\x1b[32m50 %" in outputs[1]
    assert job.log(0) == "100 %\nfirst\nbar 19\ndetail 19\nfinished\n"


def test_a_reader_that_leaves_does_not_end_the_run(start):
    job = start("talkative", 1)
    assert job.parent.stdout.readline() == b"line 0\n"
    job.parent.stdout.close()
    job.wait_for("talked0")
    job.parent.wait(30)
    assert "line 19999" in job.log(0) and "console lost" in job.log(0)
    assert not job.left()


@pytest.mark.parametrize(
    ("scenario", "status", "words"),
    [
        ("value_error", "failed", "rank 1: ValueError: the first cause"),
        ("peers", "failed", "rank 1: ValueError: the first cause"),
        ("exits", "failed", "rank 1: exit code 3"),
        ("segfault", "failed", "rank 1: killed by SIGSEGV"),
        ("unprotected", "failed", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("memory_error", "oom", "rank 1: MemoryError: no more"),
        ("cuda_out_of_memory", "oom", "rank 1: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB of many"),
        ("not_finite", "nan", "rank 1: FloatingPointError: the loss is nan in step 3"),
    ],
)
def test_the_first_cause_is_named_in_one_line(start, scenario, status, words):
    job = start(scenario, 2)
    code, _, err = job.end()
    assert code == 1 and not job.left()
    last = err.splitlines()[-1]
    assert last.startswith(f"{status}: rank ") and words in last and f"ranks{os.sep}rank" in last
    assert job.result()["status"] == status and job.result()["cause"] == last.removeprefix(f"{status}: ")
    if scenario == "value_error":
        assert (job.dir / "closed0").exists(), "the other rank was not given time to close"
        assert "Traceback" in job.log(1)


def test_a_killed_rank_is_named_and_the_others_end(start):
    job = start("works", 2)
    job.wait_for("ready0", "ready1")
    os.kill(job.pid_of(1), signal.SIGKILL)
    code, _, err = job.end()
    assert code == 1 and "rank 1: killed by SIGKILL" in err.splitlines()[-1] and not job.left()
    assert (job.dir / "closed0").exists()


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
def test_a_signal_to_the_parent_ends_everything_in_order(start, signum, code):
    job = start("works", 2)
    job.wait_for("ready0", "ready1")
    job.parent.send_signal(signum)
    ended, _, _ = job.end()
    assert ended in (code, -signum) and not job.left()  # Python itself reports an unhandled Ctrl-C as -SIGINT
    assert (job.dir / "closed0").exists() and (job.dir / "closed1").exists()
    assert job.result()["status"] == "interrupted" and signum.name in job.result()["cause"]


@pytest.mark.parametrize("scenario", ["works", "stuck", "frozen"])
def test_a_killed_parent_leaves_nothing(start, scenario):
    job = start(scenario, 2)
    job.wait_for("ready0", "ready1")
    job.parent.kill()
    job.parent.wait()
    assert not job.left()


def test_a_parent_under_nohup_outlives_its_terminal(start):
    job = start("works", 1, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    job.wait_for("ready0")
    job.parent.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert job.parent.poll() is None
    job.parent.terminate()
    assert job.end()[0] == 143 and not job.left()


def test_a_run_that_hangs_is_stopped_and_the_rank_behind_is_named(start):
    job = start("stuck", 2, 4)
    code, _, err = job.end()
    last = err.splitlines()[-1]
    assert code == 1 and last.startswith("timeout: not finished after train.timeout_s=4; rank 1 in 'step 6' at ")
    assert "tests/launch_rank.py:" in last and "stand_still; rank 0 in 'step 7'" in last
    assert (job.dir / "last_words0").read_text() == str(int(signal.SIGTERM))
    assert job.result()["status"] == "timeout" and not job.left()


def test_when_nothing_moves_the_rank_behind_is_named(start):
    job = start("stuck", 2)
    for line in job.parent.stderr:  # a slow start may be reported first
        if b"rank 1 in 'step 6'" in line:
            break
    assert line.startswith(b"nothing has moved for ") and b"tests/launch_rank.py:" in line and b"stand_still;" in line
    job.parent.terminate()
    assert job.end()[0] == 143 and not job.left()


def test_a_rank_that_hears_nothing_is_killed(start):
    job = start("frozen", 2, 0.5, 1.0)
    code, _, err = job.end()
    assert code == 1 and err.splitlines()[-1].startswith("timeout: ") and not job.left()


def test_a_second_ctrl_c_does_not_wait(start):
    job = start("frozen", 1, 1000, 1000)
    job.wait_for("ready0")
    job.parent.send_signal(signal.SIGINT)
    assert b"once more" in job.parent.stderr.readline() + job.parent.stderr.readline()
    time.sleep(1)
    job.parent.send_signal(signal.SIGINT)
    assert job.end()[0] == -signal.SIGINT and not job.left()


def test_one_signal_delivered_twice_leaves_time_to_close(start):
    job = start("works", 2)
    job.wait_for("ready0", "ready1")
    job.parent.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    job.parent.send_signal(signal.SIGTERM)
    assert job.end()[0] == 143 and not job.left()
    assert (job.dir / "closed0").exists() and (job.dir / "closed1").exists()


def test_signals_to_all_processes_at_once_are_an_interruption(start):
    job = start("works", 2)
    job.wait_for("ready0", "ready1")
    for pid in job._pids():
        os.kill(pid, signal.SIGTERM)
    assert job.end()[0] == 143 and not job.left()
    assert job.result()["status"] == "interrupted"


def test_a_rank_stopped_alone_is_named(start):
    job = start("works", 2)
    job.wait_for("ready0", "ready1")
    os.kill(job.pid_of(1), signal.SIGTERM)
    code, _, err = job.end()
    assert code == 1 and "rank 1: stopped from outside by SIGTERM" in err.splitlines()[-1] and not job.left()


def test_what_a_rank_started_goes_with_it(start):
    job = start("helper", 1)
    assert job.end()[0] == 0 and not job.left()


def test_runs_at_the_same_time_do_not_meet(start):
    jobs = [start("meets", 2, name=name) for name in ("one", "two", "three")]
    for job in jobs:
        assert job.end()[0] == 0
        assert (job.dir / "met1").read_text() == job.dir.name


def test_ranks_stuck_in_a_collective_end_with_last_words(start):
    job = start("deadlock", 2)
    job.wait_for("ready0", "ready1")
    job.parent.terminate()
    code, _, _ = job.end()
    assert code == 143 and not job.left()
    # When the first of them is gone, the collective of the other may fail before its patience ends.
    assert any((job.dir / f"last_words{rank}").exists() for rank in range(2))
    assert job.result()["status"] == "interrupted"


def test_the_first_cause_comes_before_what_the_collective_says(start):
    code, _, err = (job := start("collective_fails", 2)).end()
    assert code == 1 and "rank 1: ValueError: the first cause" in err.splitlines()[-1]
    assert "Traceback" not in err, "rank 0 only lost its peer"
    assert not job.left()
