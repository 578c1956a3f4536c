"""Small ranks for the tests of launching: each scenario ends, fails or stands still in its own way."""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from parallel import rank_process
from parallel.heartbeat import Heartbeat

scenario, run_dir = sys.argv[1], Path(sys.argv[2])
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(name: str, text: str = "") -> None:
    """Leave a file for the test or another rank, complete from the start."""
    (run_dir / f"{name}{rank}.part").write_text(text)
    (run_dir / f"{name}{rank}.part").rename(run_dir / f"{name}{rank}")


def wait_for(name: str) -> None:
    while not (run_dir / name).exists():
        time.sleep(0.01)


def stand_still(library: ctypes.CDLL) -> None:
    """Wait for a lock that is never given back, inside C, where no signal handler of Python runs."""
    lock = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)


def ok():
    say("environment", json.dumps(dict(os.environ)))
    terminal = sys.stdout.isatty() and tuple(shutil.get_terminal_size())
    print(f"rank {rank} of {world_size}, terminal {terminal}")
    print(f"rank {rank} to stderr", file=sys.stderr)
    os.write(1, f"rank {rank} from below Python\n".encode())


def progress():
    """Progress bars of one line, then of two, as terminals show them: each state is drawn over the one before."""
    for done in range(0, 101, 5):
        print(f"\r\x1b[2K\x1b[32m{done} %\x1b[0m", end="", flush=True)
        time.sleep(0.01)
    # In one piece: until a rank has gone up for the first time, a line that is complete when it is read is kept.
    before = "\nfirst\nbar\ndetail"
    for done in range(20):
        sys.stdout.write(f"{before}\r\x1b[2K\x1b[1A\x1b[2Kbar {done}\ndetail {done}")
        sys.stdout.flush()
        before = ""
        time.sleep(0.01)
    print("\nfinished")


def talkative():
    for line in range(20000):
        print(f"line {line}")
    say("talked")


def works():
    """Goes on for ever, and says so when it is asked to stop."""
    heartbeat = Heartbeat(run_dir, rank)
    try:
        for step in range(10**9):
            heartbeat.beat(f"step {step}")
            if step == 3:
                say("ready")
            time.sleep(0.02)
    finally:
        say("closed")


def fails(error: Exception):
    """Rank 1 fails while rank 0 works."""
    if rank == 1:
        wait_for("ready0")
        raise error
    works()


def peers():
    """Rank 0 notices that rank 1 failed, and is gone, before rank 1 has ended."""
    if rank == 0:
        wait_for("failed1")
        raise RuntimeError("[tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
    try:
        raise ValueError("the first cause")
    except ValueError as error:
        rank_process.record(error)
    say("failed")
    time.sleep(1)
    os._exit(1)


def exits():
    if rank == 1:
        os._exit(3)
    works()


def stuck():
    """Inside a call that lets other threads run, like a collective."""
    rank_process.last_words(lambda signum: say("last_words", str(signum)))
    heartbeat = Heartbeat(run_dir, rank)
    heartbeat.beat("step 6")
    if rank == 0:
        heartbeat.beat("step 7")
    say("ready")
    stand_still(ctypes.CDLL(None))


def frozen():
    """Inside a call that lets nothing run."""
    say("ready")
    stand_still(ctypes.PyDLL(None))


def helper():
    """Ends, but leaves a process of its own behind."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdout=subprocess.DEVNULL)


def meets():
    """Rank 0 serves the port that was reserved for it, rank 1 connects."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(address) as server:
            server.accept()[0].sendall(run_dir.name.encode())
        return
    for _ in range(500):
        try:
            with socket.create_connection(address) as connection:
                return say("met", connection.recv(100).decode())
        except ConnectionRefusedError:
            time.sleep(0.01)


def deadlock():
    """Two real ranks, each waiting in C++ for what the other never sends."""
    import torch
    import torch.distributed as dist

    rank_process.last_words(lambda signum: say("last_words", str(signum)))
    dist.init_process_group("gloo")
    dist.barrier()
    say("ready")
    dist.recv(torch.ones(1), src=1 - rank)


def collective_fails():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(10):
        if rank == 1 and step == 3:
            raise ValueError("the first cause")
        dist.all_reduce(torch.ones(1))


SCENARIOS = {
    "value_error": lambda: fails(ValueError("the first cause")),
    "memory_error": lambda: fails(MemoryError("no more")),
    "cuda_out_of_memory": lambda: fails(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nof many")),
    "not_finite": lambda: fails(FloatingPointError("the loss is nan in step 3")),
}

if scenario == "unprotected":  # a program that fails before it gets to rank_process
    import no_such_module  # noqa: F401
if scenario == "segfault" and rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
rank_process.run(SCENARIOS.get(scenario) or globals().get(scenario, works))
