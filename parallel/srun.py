"""The ranks of one run as one step of a SLURM allocation; the same face as `parallel.ranks` for one machine.

srun starts a `parallel.slurm_task` for each rank. It and this process talk through srun's own streams: orders go to
the tasks on stdin, reports come back among the lines of stderr. Rank 0's output comes through srun to this console.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from parallel import slurm
from parallel.console import Console
from parallel.failure import Ended
from parallel.heartbeat import QUIET_S
from parallel.slurm_task import GRACE_S, LEFTOVER_S, MARK

PLACE_S = 2.0  # to hear from every node where its ranks stand
KILL_S = 5.0  # from the order to kill until the step is gone
_ROOT = Path(__file__).resolve().parent.parent
# What srun would take for options of this step are options of the whole allocation; these alone say where it is.
_KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_NETWORK")
_MARK = MARK.encode()


class Step:
    """Ranks on the nodes of this process's allocation, with one log each in `ranks_dir`.

    Rank 0 has this process's console as well. `failed` lists the ranks that failed before anybody stopped them.
    Raises slurm.NoAllocation when there is no allocation.
    """

    def __init__(self, ranks_dir: Path, cfg):
        there = slurm.allocation()
        self._hosts = slurm.hosts(cfg, there)
        on_each = Counter(self._hosts)
        self.local_world_size = max(on_each.values())
        cpus = min(n for host, n in zip(there.hosts, there.cpus, strict=True) if host in on_each)
        self.cpus_per_rank = max(1, cpus // self.local_world_size)
        self._crowded = cpus < self.local_world_size
        # A network file system shows what another node wrote up to half a minute late.
        self.quiet_s = 3 * QUIET_S if len(on_each) > 1 else QUIET_S

        ranks_dir.mkdir(parents=True, exist_ok=True)
        for old in ranks_dir.glob("rank*"):  # of an earlier try in the same folder
            old.unlink()
        self.failed: list[Ended] = []
        self._dir, self._job = ranks_dir, there.job
        self._alive = set(range(len(self._hosts)))
        self._places: dict[int, str] = {}
        self._order: dict = {}
        self._process: subprocess.Popen | None = None
        self._said_by_srun = ""
        self._console = Console(ranks_dir / "rank0.log")

    def start(self, entry: list[str], world_size: int, env: dict[str, str | None]) -> None:
        """Start command `entry` as each of the ranks with `env` laid over the environment."""
        self._order = {"entry": entry, "env": env}
        (self._dir / "rank.hosts").write_text("".join(f"{host}\n" for host in self._hosts))
        spread = ["--overcommit"] if self._crowded else [f"--cpus-per-task={self.cpus_per_rank}"]
        command = [
            "srun",
            f"--nodes={len(set(self._hosts))}",
            f"--ntasks={world_size}",
            "--distribution=arbitrary",  # rank i on line i of SLURM_HOSTFILE
            *spread,
            "--overlap",  # this process may itself be a step that has all the CPUs
            "--mpi=none",
            "--wait=0",
            "--kill-on-bad-exit=1",  # of a task; a rank's failure is reported, and does not end its task badly
            *(sys.executable, "-m", "parallel.slurm_task", str(self._dir)),
        ]
        # Ours to write on, because the console closes its end once its writer has started.
        self._stderr = os.dup(self._console.stderr)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._console.stdout,
            stderr=subprocess.PIPE,
            env=self._environment(),
            start_new_session=True,  # Ctrl-C is for us; srun would kill the ranks without letting them close
        )
        self._console.started()
        self._reader = threading.Thread(target=self._read, name="srun-stderr", daemon=True)
        self._reader.start()

    def _environment(self) -> dict[str, str]:
        other = ("SLURM_", "TORCHELASTIC_")
        kept = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(other)}
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        return kept | {"SLURM_HOSTFILE": str(self._dir / "rank.hosts"), "PYTHONPATH": path}

    def _read(self) -> None:
        """Sort srun's stderr: reports of tasks are taken in, everything else goes to the console."""
        for line in self._process.stderr:
            text, _, report = line.partition(_MARK)
            if text.startswith(b"srun: error:"):
                self._said_by_srun = text.decode(errors="replace").strip()
            with contextlib.suppress(OSError):  # the console is closed
                os.write(self._stderr, text)
            if report:
                self._hear(json.loads(report))
        os.close(self._stderr)

    def _hear(self, report: dict) -> None:
        rank = report["rank"]
        if "meet" in report:
            self._say(self._order | {"master": report["meet"]})
        elif "place" in report:
            self._places[rank] = report["place"]
        else:
            if report["code"] and report["itself"]:
                self.failed.append(Ended(rank, report["code"], time.time(), report["out_of_memory"]))
            self._alive.discard(rank)

    def _say(self, order) -> None:
        with contextlib.suppress(OSError):  # srun has ended
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def places(self) -> dict[int, str]:
        """The line of code that each living rank is in."""
        self._places = {}
        self._say("place")
        until = time.monotonic() + PLACE_S
        while time.monotonic() < until and not self._alive <= set(self._places):
            time.sleep(0.05)
        return dict(self._places)

    def tick(self, wait_s: float) -> bool:
        """Pass rank 0's output on for up to `wait_s` seconds and see who has ended. False when nobody is left."""
        self._console.pump(wait_s)
        if self._process.poll() is not None:
            self._pump(LEFTOVER_S, lambda: not self._reader.is_alive())
            self._account_for_lost()
        return bool(self._alive)

    def _account_for_lost(self) -> None:
        """srun has ended: a rank of which nothing was heard is lost, with its node or before it came to life."""
        if self._alive and not self.failed:
            rank = min(self._alive)
            why = self._said_by_srun or f"srun ended with exit code {self._process.returncode}"
            error = self._dir / f"rank{rank}.error.json"
            if not error.exists():
                error.write_text(json.dumps({"message": f"lost: {why}"}))
            self.failed.append(Ended(rank, self._process.returncode or 1, time.time()))
        self._alive.clear()

    def end(self, in_haste: Callable[[], bool], extra_s: float = 0.0) -> bool:
        """Stop what still runs: SIGTERM, after GRACE_S + extra_s (sooner when `in_haste()`) SIGKILL, helpers too.

        True when a rank was still running.
        """
        running = bool(self._alive)
        if self._process is not None:
            if running:
                self._say("stop")
            self._pump(GRACE_S + extra_s + LEFTOVER_S, lambda: self._process.poll() is not None or in_haste())
            self._say("kill")
            self._pump(KILL_S, lambda: self._process.poll() is not None)
            # A task that no longer listens. When srun goes, the daemon of each node kills what it started.
            self._process.kill()
            self._process.wait()
            self._pump(LEFTOVER_S, lambda: not self._reader.is_alive())
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._console.close(patience_s=LEFTOVER_S if running else None)
        return running

    def _pump(self, for_s: float, until: Callable[[], bool]) -> None:
        end = time.monotonic() + for_s
        while not until() and time.monotonic() < end:
            self._console.pump(0.05)
