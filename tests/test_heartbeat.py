"""When nothing moves, it is said which rank stands where; a run that moves is left alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from parallel.heartbeat import Heartbeat, Watch
from parallel.stacks import FILE_VARIABLE, ask, place

REPO = Path(__file__).resolve().parent.parent


def test_the_rank_that_is_behind_comes_first(tmp_path):
    watch = Watch(tmp_path, 4, quiet_s=0.05)
    beats = [Heartbeat(tmp_path, rank) for rank in range(4)]
    for rank, beat in enumerate(beats):
        beat.beat("step 1")
        if rank != 2:
            beat.beat("step 2")
    assert watch.look() is None  # they have just moved
    time.sleep(0.1)
    assert watch.look() >= 0.05
    assert watch.positions() == "rank 2 in 'step 1'; ranks 0, 1, 3 in 'step 2'"


def test_the_odd_one_comes_first_when_all_are_in_the_same_phase(tmp_path):
    watch = Watch(tmp_path, 4)
    places = {rank: "data/batches.py:40 step" if rank == 3 else "models/loss.py:9 run" for rank in range(4)}
    assert watch.positions(places) == (
        "rank 3 in 'start-up' at data/batches.py:40 step; ranks 0, 1, 2 in 'start-up' at models/loss.py:9 run"
    )


def test_silence_is_reported_at_growing_intervals_and_no_more_after_a_move(tmp_path):
    watch, beat = Watch(tmp_path, 1, quiet_s=0.05), Heartbeat(tmp_path, 0)
    time.sleep(0.06)
    assert watch.look() and watch.look() is None
    beat.beat("step 1")
    assert watch.look() is None
    # It has got over a pause of 0.06 s, so a pause as long as that is nothing to report.
    time.sleep(0.1)
    assert watch.look() is None


def test_a_process_tells_where_it_stands(tmp_path):
    file = tmp_path / "rank0.stack"
    program = "import time\nfrom parallel import stacks\nstacks.answer()\nprint('ready', flush=True); time.sleep(60)"
    env = os.environ | {FILE_VARIABLE: str(file), "PYTHONPATH": str(REPO)}
    process = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE)
    process.stdout.readline()
    for _ in range(2):
        ask(process.pid, file)
        until = time.monotonic() + 20
        while not place(file) and time.monotonic() < until:
            time.sleep(0.02)
        assert place(file) == "<string>:4 <module>"
    process.kill()
    process.wait()


def test_a_process_that_cannot_tell_is_not_asked(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ask(process.pid, tmp_path / "absent.stack")
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
