"""The processes of one run on this machine: started together, ended together."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from parallel import environment, rank_process, stacks
from parallel.console import Console
from parallel.failure import Ended
from parallel.heartbeat import QUIET_S

GRACE_S = 10.0  # from SIGTERM to SIGKILL: time to close W&B
LEFTOVER_S = 2.0  # for helper processes of ranks that have ended


class Ranks:
    """Ranks as child processes, each in a session of its own, with one log each in `ranks_dir`.

    Rank 0 has this process's console as well. `failed` lists the ranks that failed before anybody stopped them.
    """

    # What a SLURM step knows of its nodes; here all ranks share one machine.
    local_world_size = cpus_per_rank = None
    quiet_s = QUIET_S

    def __init__(self, ranks_dir: Path):
        ranks_dir.mkdir(parents=True, exist_ok=True)
        for old in ranks_dir.glob("rank*"):  # of an earlier try in the same folder
            old.unlink()
        self.failed: list[Ended] = []
        self._dir = ranks_dir
        self._alive: dict[int, subprocess.Popen] = {}
        self._groups: list[int] = []
        self._console = Console(ranks_dir / "rank0.log")
        # Bound but not listening: while it is held the system gives this port to nobody else, and rank 0, whose store
        # sets SO_REUSEADDR as we do, can listen on it.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("", 0))

    def start(self, entry: list[str], world_size: int, env: dict[str, str | None]) -> None:
        """Start `world_size` processes of command `entry` with `env` laid over this process's environment."""
        common = env | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.getsockname()[1]),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            rank_process.PARENT_PID: str(os.getpid()),
        }
        base = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        for rank in range(world_size):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                rank_process.ERROR_FILE: str(self._error_file(rank)),
                stacks.FILE_VARIABLE: str(self._stack_file(rank)),
            }
            self._start(rank, entry, environment.apply(common | own, base))
        self._console.started()

    def _start(self, rank: int, entry: list[str], env: dict[str, str]) -> None:
        options = {"stdin": subprocess.DEVNULL, "env": env, "start_new_session": True}
        if rank == 0:
            process = subprocess.Popen(entry, stdout=self._console.stdout, stderr=self._console.stderr, **options)
        else:
            with (self._dir / f"rank{rank}.log").open("wb") as log:
                process = subprocess.Popen(entry, stdout=log, stderr=subprocess.STDOUT, **options)
        self._alive[rank] = process
        self._groups.append(process.pid)

    def _error_file(self, rank: int) -> Path:
        return self._dir / f"rank{rank}.error.json"

    def _stack_file(self, rank: int) -> Path:
        return self._dir / f"rank{rank}.stack"

    def places(self) -> dict[int, str]:
        """The line of code that each living rank is in."""
        for rank, process in self._alive.items():
            stacks.ask(process.pid, self._stack_file(rank))
        time.sleep(0.2)
        return {rank: stacks.place(self._stack_file(rank)) for rank in self._alive}

    def tick(self, wait_s: float) -> bool:
        """Pass rank 0's output on for up to `wait_s` seconds and see who has ended. False when nobody is left."""
        self._console.pump(wait_s)
        if self._reap(self.failed):
            self._reap(self.failed)  # whoever ended before the one just seen has ended by now
        return bool(self._alive)

    def _reap(self, failed: list[Ended]) -> bool:
        codes = {rank: process.poll() for rank, process in self._alive.items()}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        for rank, code in ended.items():
            del self._alive[rank]
            if code:
                failed.append(Ended(rank, code, time.time()))
        return bool(ended)

    def end(self, in_haste: Callable[[], bool], extra_s: float = 0.0) -> bool:
        """Stop what still runs: SIGTERM, after GRACE_S + extra_s (sooner when `in_haste()`) SIGKILL, helpers too.

        True when a rank was still running.
        """
        stopped_at = time.time()
        late: list[Ended] = []
        for process in self._alive.values():
            process.send_signal(signal.SIGTERM)  # to the rank alone: its W&B service must live until the rank closes it
        stopping = bool(self._alive)
        until = time.monotonic() + GRACE_S + extra_s
        while self._alive and time.monotonic() < until and not in_haste():
            self._console.pump(0.05)
            self._reap(late)
        until = time.monotonic() + (0 if self._alive else LEFTOVER_S)
        while self._helpers() and time.monotonic() < until and not in_haste():
            self._console.pump(0.05)
        for group in self._helpers():
            _signal_group(group, signal.SIGKILL)
        for process in self._alive.values():
            process.wait()  # a process in uninterruptible sleep keeps us here: better than a device in unseen use
        self._reap(late)
        # A rank can be on its way out, with its error written, when another is already gone because of it.
        self.failed += [end for end in late if _written_before(self._error_file(end.rank), stopped_at)]
        self._console.close(patience_s=LEFTOVER_S if stopping else None)
        self._port.close()
        return stopping

    def _helpers(self) -> list[int]:
        """Sessions of ranks in which some process is still there."""
        return [group for group in self._groups if _signal_group(group, 0)]


def _signal_group(group: int, signum: int) -> bool:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    return True


def _written_before(file: Path, at: float) -> bool:
    return file.exists() and file.stat().st_mtime <= at
