"""Points of a sweep at the same time on one machine: each a program of its own, with GPUs that no other has."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from parallel.devices import visible_devices
from parallel.host import cores
from parallel.rank_process import die_with_parent
from parallel.resolve import world_size
from parallel.sweep import Point, Sweep
from tracking import result
from tracking.console import duration

TICK_S = 0.1
LOG = "console.log"


@dataclass
class _Program:
    """A point that runs: its process, the GPUs it has, and when it started."""

    point: Point
    process: subprocess.Popen
    gpus: list[str]
    began: float


def run(begun: Sweep, due: list[Point], at_once: int) -> None:
    """Run up to `at_once` points at a time, in their order, each as soon as there are GPUs for it.

    A point's console is a file in its run folder; here one line tells when it starts and one how it ended. A signal, as
    KeyboardInterrupt or SystemExit, ends all of them in order; a second one at once.
    """
    waiting, free, running = list(due), visible_devices(), []
    try:
        while waiting or running:
            while waiting and len(running) < at_once and _needs(waiting[0]) <= len(free):
                point = waiting.pop(0)
                gpus = [free.pop(0) for _ in range(_needs(point))]
                running.append(_start(begun, point, gpus, at_once))
            time.sleep(TICK_S)
            for program in [program for program in running if program.process.poll() is not None]:
                running.remove(program)
                free += program.gpus
                _tell(begun, program)
    except BaseException as stopped:
        _stop(running, signal.SIGINT if isinstance(stopped, KeyboardInterrupt) else signal.SIGTERM)
        raise


def _needs(point: Point) -> int:
    """GPUs of a point."""
    return world_size(point.cfg) if point.cfg.launch.device == "cuda" else 0


def _start(begun: Sweep, point: Point, gpus: list[str], at_once: int) -> _Program:
    begun.freeze(point)
    run_dir = begun.run_dir(point)
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    if not gpus:
        # The cores are shared by all that runs, not by the ranks of one point.
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // (at_once * world_size(point.cfg)))))
    command = [sys.executable, "-u", str(Path(sys.argv[0]).resolve()), "--point", str(run_dir.resolve())]
    with (run_dir / LOG).open("wb") as log:
        # In a session of its own, so that Ctrl-C reaches it through `_stop` alone, and in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    where = f"GPU {','.join(gpus)}" if gpus else "CPU"
    print(f"{point}: started on {where}; its console is {run_dir / LOG}", flush=True)
    return _Program(point, process, gpus, time.monotonic())


def _tell(begun: Sweep, program: _Program) -> None:
    """One line on how a point ended; one that could not say so itself is recorded as failed."""
    run_dir, code = begun.run_dir(program.point), program.process.returncode
    if "status" not in result.load(run_dir):
        result.complete(run_dir, "failed", f"the point's own program ended with exit code {code} (see {run_dir / LOG})")
    outcome = result.load(run_dir)
    cause = f": {outcome['cause']}" if outcome.get("cause") else ""
    took = duration(time.monotonic() - program.began)
    print(f"{program.point}: {outcome['status']} after {took}{cause}", flush=True)


def _stop(running: list[_Program], signum: int) -> None:
    try:
        for program in running:
            program.process.send_signal(signum)
        for program in running:
            program.process.wait()
    except BaseException:
        for program in running:
            program.process.kill()  # its ranks go with it
        raise
