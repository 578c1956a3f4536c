"""Run one job: start its ranks, watch them, and leave nothing behind however it ends.

The ranks are processes of this machine or tasks of a SLURM step. This process needs neither torch nor a rendezvous
server: rank 0 serves the store, on a port reserved for it.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from conf.schema import LaunchKind
from parallel import environment, rank_process, slurm, srun
from parallel.explain import Explanation, explain
from parallel.failure import first_cause, oom_kills
from parallel.heartbeat import LOOK_S, Watch
from parallel.ranks import Ranks

TICK_S = 0.1
AGAIN_S = 0.5  # a second signal sooner than this is the first one, delivered twice
_TRAIN = Path(__file__).resolve().parent.parent / "train.py"
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class JobFailed(Exception):
    """The run failed by itself. `str()` is the first cause in one line; `status` is failed, oom, nan or timeout.

    `known` is what parallel.explain says about it, None when it is no known failure.
    """

    def __init__(self, cause: str, status: str, known: Explanation | None = None):
        super().__init__(cause)
        self.status, self.known = status, known


def run(run_dir: str | Path, frozen, entry: list[str] | None = None) -> None:
    """Run `frozen.world_size` ranks to their end.

    run_dir: holds resolved.yaml; gets one log a rank under `ranks/`. frozen: `parallel.compose.Frozen`. entry: command
    of a rank, by default `train.py --rank RUN_DIR`.

    Raises JobFailed (a rank failed, or train.timeout_s passed), KeyboardInterrupt (SIGINT) or SystemExit(128 + n)
    (another signal n). Whenever the ranks did not end well, result.json and the W&B run have been completed with status
    and cause.
    """
    from tracking import report, result, wandb_close

    run_dir = Path(run_dir).resolve()
    entry = entry or [sys.executable, "-u", str(_TRAIN), "--rank", str(run_dir)]
    kills = oom_kills()
    asked = late = standing = None
    with _Signals() as signals:
        result.clear(run_dir, history=frozen.cfg.checkpoint.resume != "auto")
        try:
            on_slurm = frozen.cfg.launch.kind is LaunchKind.srun
            ranks = srun.Step(run_dir / "ranks", frozen.cfg) if on_slurm else Ranks(run_dir / "ranks")
        except slurm.NoAllocation as missing:
            result.complete(run_dir, "failed", str(missing))
            raise JobFailed(str(missing), "failed") from None

        def why() -> tuple[str, str] | None:
            if asked:
                return "interrupted", f"stopped by {signal.Signals(asked).name}"
            if late is not None:
                return "timeout", f"not finished after train.timeout_s={frozen.cfg.train.timeout_s:g}; {late}"
            found = first_cause(ranks.failed, run_dir / "ranks", kills, standing) if ranks.failed else None
            return found and (found.status, found.line)

        watch = Watch(run_dir, frozen.world_size, ranks.quiet_s)
        try:
            local, cores = ranks.local_world_size, ranks.cpus_per_rank
            env = environment.rank_environment(frozen.cfg, frozen.world_size, local, cores)
            ranks.start(entry, frozen.world_size, env)
            late = _wait(ranks, watch, signals, frozen.cfg.train.timeout_s)
            standing = _standing(ranks, watch) if ranks.failed else None
            asked = signals.first  # a signal that comes later finds a run that has ended by itself
        finally:
            # Ranks that write checkpoints end with one, unless they wait for a rank that is gone.
            last = rank_process.LAST_STEP_S if frozen.cfg.checkpoint.every and not ranks.failed else 0.0
            try:
                if told := why():
                    result.stopping(run_dir, *told)
            finally:
                stopped = ranks.end(in_haste=signals.insisted, extra_s=last)
        if not stopped and not ranks.failed:
            asked = None
        ended = why()
        known = ended and explain(*ended, frozen.cfg, run_dir)
        if ended:
            result.complete(run_dir, *ended, known)
            with contextlib.suppress(OSError, ValueError):  # result.json has it
                report.again(run_dir)
    if ended and (problem := wandb_close.close(run_dir)):
        print(problem, file=sys.stderr)
    if signals.first:
        raise KeyboardInterrupt if signals.first == signal.SIGINT else SystemExit(128 + signals.first)
    if ended:
        status, cause = ended
        raise JobFailed(cause, status, known)


def _standing(ranks: Ranks, watch: Watch) -> str:
    """Where each rank stands when the first has failed: what it waited for may be a rank that is still there."""
    watch.look()
    return watch.positions(ranks.places())


def _wait(ranks: Ranks, watch: Watch, signals: "_Signals", timeout_s: float | None) -> str | None:
    """Until all ranks are done, one has failed, a signal came, or time is up: then where each rank stands."""
    start = looked = time.monotonic()
    while ranks.tick(TICK_S) and not ranks.failed and not signals.first:
        now = time.monotonic()
        if now - looked >= LOOK_S:
            looked = now
            if quiet := watch.look():
                with contextlib.suppress(OSError):  # the terminal is gone; the run is not
                    print(f"nothing has moved for {quiet:.0f} s: {watch.positions(ranks.places())}", file=sys.stderr)
        if timeout_s is not None and now - start > timeout_s:
            watch.look()
            return watch.positions(ranks.places())
    return None


class _Signals:
    """While this is open, signals are remembered instead of acted upon, so that the ranks can be ended in order."""

    def __init__(self):
        self.first: int | None = None
        self._first_at = self._last_at = 0.0
        self._old = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for signum in _CAUGHT:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or a shell's background job
                    self._old[signum] = signal.signal(signum, self._remember)
        return self

    def insisted(self) -> bool:
        """Whether somebody asked again. `timeout` and others send one signal twice, to the process and to its group."""
        return self._last_at - self._first_at > AGAIN_S

    def _remember(self, signum, frame):
        self._last_at = time.monotonic()
        if self.first is None:
            self.first, self._first_at = signum, self._last_at
            with contextlib.suppress(OSError):  # a terminal that was closed; print() is not for signal handlers
                os.write(2, b"\nstopping the ranks; once more to stop them at once\n")

    def __exit__(self, *exc):
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
