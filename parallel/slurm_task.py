"""One task of a SLURM step: runs one rank on its node, does what the launcher says, and says how the rank ended.

Orders are JSON lines on stdin, which srun copies to every task; reports are JSON lines on stderr, marked so that the
launcher (`parallel.srun`) can tell them from other output. So nothing depends on a port, or on how soon a shared file
system shows what another node wrote. The end of stdin means that the launcher is gone, and ends the rank.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from parallel import rank_process, slurm, stacks
from parallel.failure import oom_kills

MARK = "\x1e"
GRACE_S = 10.0  # from SIGTERM to SIGKILL, as on one machine
LEFTOVER_S = 2.0


class Task:
    """Rank number SLURM_PROCID of the step, with its files in `ranks_dir`."""

    def __init__(self, ranks_dir: Path):
        self._rank = int(os.environ["SLURM_PROCID"])
        self._error_file = ranks_dir / f"rank{self._rank}.error.json"
        self._stack_file = ranks_dir / f"rank{self._rank}.stack"
        self._log = ranks_dir / f"rank{self._rank}.log"
        self._process: subprocess.Popen | None = None
        self._stopped_at: float | None = None

    def run(self) -> None:
        """From the first order to the end of the rank."""
        # scancel and the job's time limit signal everybody: the rank must have its time to close.
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        with socket.socket() as port:
            if self._rank == 0:
                # Bound but not listening: nobody else gets this port, and rank 0, whose store sets SO_REUSEADDR, can.
                port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                port.bind(("", 0))
                self._report(meet=[socket.gethostname(), port.getsockname()[1]])
            order = self._first_order()
            if order is None or self._stopped_at:
                return
            kills = oom_kills()
            self._start(**order)
            threading.Thread(target=self._obey, daemon=True).start()
            code = self._process.wait()
        out_of_memory = kills is not None and oom_kills() > kills
        self._report(code=code, itself=self._by_itself(), out_of_memory=out_of_memory)
        self._end_helpers()

    def _first_order(self) -> dict | None:
        """What to start; None when that is not wanted any more. Tasks can be asked things before all have come up."""
        for line in sys.stdin:
            match json.loads(line):
                case dict(order):
                    return order
                case "stop" | "kill":
                    return None
        return None

    def _start(self, entry: list[str], env: dict[str, str | None], master: list) -> None:
        own = {
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            "RANK": str(self._rank),
            "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": os.environ["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(slurm.local_world_size()),
            rank_process.PARENT_PID: str(os.getpid()),
            rank_process.ERROR_FILE: str(self._error_file),
            stacks.FILE_VARIABLE: str(self._stack_file),
        }
        env = {name: value for name, value in (os.environ | env | own).items() if value is not None}
        options = {"stdin": subprocess.DEVNULL, "env": env, "start_new_session": True}
        if self._rank == 0:  # srun brings it to the console
            self._process = subprocess.Popen(entry, **options)
            return
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(entry, stdout=log, stderr=subprocess.STDOUT, **options)

    def _obey(self) -> None:
        for line in sys.stdin:
            match json.loads(line):
                case "stop":
                    self._stop()
                case "kill":
                    self._signal(signal.SIGKILL)
                case "place":
                    stacks.ask(self._process.pid, self._stack_file)
                    time.sleep(0.2)
                    self._report(place=stacks.place(self._stack_file))
        self._stop()
        time.sleep(GRACE_S)
        self._signal(signal.SIGKILL)

    def _stop(self) -> None:
        self._stopped_at = self._stopped_at or time.time()
        if self._process and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)  # to the rank alone: its W&B service must outlive it

    def _by_itself(self) -> bool:
        """Whether the rank ended before anybody stopped it, or was on its way out with its error written."""
        if self._stopped_at is None:
            return True
        return self._error_file.exists() and self._error_file.stat().st_mtime <= self._stopped_at

    def _end_helpers(self) -> None:
        until = time.monotonic() + LEFTOVER_S
        while self._signal(0) and time.monotonic() < until:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> bool:
        """To the rank and the processes it started; False when there are none any more."""
        try:
            os.killpg(self._process.pid, signum)
        except ProcessLookupError:
            return False
        return True

    def _report(self, **what) -> None:
        # One write, so that no other output gets in between.
        os.write(2, f"{MARK}{json.dumps({'rank': self._rank} | what)}\n".encode())


if __name__ == "__main__":
    Task(Path(sys.argv[1])).run()
