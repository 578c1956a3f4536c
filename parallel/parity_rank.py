"""One rank of the parity protocol: it imports once, and trains every point in a process that is forked from it.

So only the first point costs a start, and none inherits anything from the one before: Megatron's groups cannot be taken
down completely, and gloo's threads of those that are left keep the processors busy. Every point is what `train.py` does
with a run, from the device to the checkpoint. Rank 0 compares it with its reference as soon as it is there.
"""

import contextlib
import importlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path

from parallel import agreement, checkpoint_files, rank_process
from parallel.parity_points import FOUND, PLAN, Point
from parallel.parity_table import row
from tracking import history

IMPORTS = "models.gpt models.sample optim.build parallel.wrap parallel.checkpoint megatron.core.models.gpt".split()
LOOK_S = 0.02


def run(train: Callable[[Path], None], root: Path) -> None:
    """Train the points of the plan in `root` that have a place for this rank, in order, by `train(folder)`."""
    from parallel import quiet

    quiet.libraries()
    for name in IMPORTS:
        importlib.import_module(name)
    rank, launcher = int(os.environ["RANK"]), os.getpid()
    for point in [Point(**point) for point in json.loads((root / PLAN).read_text())]:
        if rank >= point.world_size:
            continue
        port = _port(root / point.folder, rank)
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            if code := os.waitstatus_to_exitcode(status):
                os._exit(code if code > 0 else 128 - code)  # the child has said why
            continue
        size = str(point.world_size)
        os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ[rank_process.PARENT_PID] = str(launcher)
        rank_process.run(_one, train, root, point)
        sys.stdout.flush()
        os._exit(0)


def _one(train: Callable[[Path], None], root: Path, point: Point) -> None:
    began, rank, folder = time.monotonic(), int(os.environ["RANK"]), root / point.folder
    log = folder / f"rank{rank}.log"
    with log.open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        train(folder)
    if rank == 0:
        found = None if point.is_reference else deviation(folder, root / point.reference)
        _report(root, point, found, time.monotonic() - began)


def _port(folder: Path, rank: int) -> str:
    """The port at which the ranks of a point meet; rank 0 chooses it when the point before is done."""
    file = folder / "port"
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            file.with_suffix(".tmp").write_text(str(free.getsockname()[1]))
        file.with_suffix(".tmp").rename(file)
    while not file.exists():  # other layouts train
        time.sleep(LOOK_S)
    return file.read_text()


def deviation(ours: Path, reference: Path) -> agreement.Deviation:
    """How far two run folders are apart, by their metrics and their last checkpoints."""
    lines = [list(history.read(folder)) for folder in (ours, reference)]
    return agreement.Deviation(
        loss=agreement.of_metrics(*lines, "train/loss", "val/loss"),
        norm=agreement.of_metrics(*lines, "grad/norm"),
        weights=_weights(ours, reference),
    )


def _weights(ours: Path, reference: Path) -> float:
    """Norm of the difference of all master weights over the norm of the reference's."""
    from parallel import checkpoint_io

    ours, reference = (checkpoint_files.latest(folder / checkpoint_files.FOLDER) for folder in (ours, reference))
    names = [name for name in checkpoint_io.read_index(reference) if name.startswith("weights/")]
    square = difference = 0.0
    for name in names:  # one at a time: models may be large
        a, b = (checkpoint_io.read(checkpoint, [name])[name].double() for checkpoint in (ours, reference))
        difference += float((a - b).square().sum())
        square += float(b.square().sum())
    return (difference / square) ** 0.5


def _report(root: Path, point: Point, found: agreement.Deviation | None, seconds: float) -> None:
    if found is not None:
        shutil.rmtree(root / point.folder / checkpoint_files.FOLDER)
        point.found, point.failed = list(astuple(found)), found.beyond(agreement.Deviation(*point.allowed))
    point.seconds = seconds
    with (root / FOUND).open("a") as file:
        file.write(json.dumps(asdict(point)) + "\n")
    print(row(point), flush=True)
