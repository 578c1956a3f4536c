"""Writes the checkpoints of a run, one at a time: beside training from a copy in host memory, or while training waits.

Everything that takes long happens in one thread a rank. The threads talk to each other through a gloo group of their
own, because collectives of two threads in one group could meet in another order on another rank.
"""

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

import torch.distributed as dist

from parallel import checkpoint_files as files
from parallel import checkpoint_io as io
from parallel import frozen, host
from parallel.checkpoint_copy import HostCopy
from parallel.checkpoint_files import BadCheckpoint
from parallel.checkpoint_io import Pieces


class Writer:
    """Every rank has one and calls the same methods with the same step.

    `note` says how checkpoints are written. `asked`: `checkpoint.asynchronous`. `size`: bytes that this rank writes.
    """

    def __init__(self, run_dir: Path, keep: int, asked: bool | str, size: int):
        self.run_dir, self.keep = run_dir, keep
        self.beside, self.note = _beside(asked, size)
        self._group = dist.new_group(backend="gloo") if self.beside else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if self.beside else None
        self._copy = HostCopy(size) if self.beside else None
        # What the thread does; at first it makes the memory of the copy ready, while training begins.
        self._writing: Future | None = self._thread.submit(self._copy.prepare) if self.beside else None

    def start(self, step: int, tensors: dict[str, Pieces], about: dict) -> None:
        """Write the checkpoint after `step` steps; when this returns, training may change `tensors`.

        Waits for the one before. Raises BadCheckpoint on all ranks alike when that one, or this one while training
        waits, was not written.
        """
        self.finish()
        if self.beside:
            self._writing = self._thread.submit(self._write, step, self._copy.take(tensors), about)
        else:
            self._write(step, tensors, about)

    def finish(self) -> None:
        """Wait until what was started is complete. Raises BadCheckpoint on all ranks alike when it was not written."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    def busy(self) -> bool:
        """Whether `finish` would have to wait."""
        return bool(self._writing and not self._writing.done())

    def failed(self) -> bool:
        """Whether this rank knows already that `finish` will raise."""
        return bool(self._writing and not self.busy() and self._writing.exception())

    def settle(self, seconds: float) -> None:
        """Give what was started time to become complete, whether it does or not: for a run that fails otherwise."""
        if self._writing:
            wait_for([self._writing], seconds)

    def _write(self, step: int, tensors: dict[str, Pieces], about: dict) -> None:
        rank, folder = dist.get_rank(), self.run_dir / files.FOLDER
        unfinished = folder / f"{files.UNFINISHED}{files.name_of(step)}"

        def finish(known: dict[str, dict]) -> None:
            files.write_synced(unfinished / frozen.FILE, (self.run_dir / frozen.FILE).read_bytes())
            for name in (io.INDEX, frozen.FILE):
                known[name] = files.fingerprint(unfinished / name)
            files.commit(unfinished, about | {"files": known}, self.keep)

        try:
            self._together(lambda: files.begin(folder, step) if rank == 0 else None, folder)
            written = self._together(lambda: io.save(unfinished, tensors, self._group), unfinished)
            known = {name: about for part in written for name, about in part.items()}
            self._together(lambda: finish(known) if rank == 0 else None, unfinished)
        except BadCheckpoint:
            if rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)  # on a full disk it is in the way of everything else
            raise

    def _together(self, do, path: Path) -> list:
        """Run something on every rank and gather what it returns; one rank's trouble with the disk is everybody's."""
        result = problem = None
        try:
            result = do()
        except OSError as error:
            problem = f"{error.filename or path} cannot be written: {error.strerror or error}"
        except dist.checkpoint.api.CheckpointException as error:
            problem = f"{path} cannot be written: {str(error).strip().splitlines()[-1]}"
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, (result, problem), group=self._group)
        problem = next((problem for _, problem in told if problem), None)
        if problem:
            raise BadCheckpoint(f"No checkpoint was written: {problem}.")
        return [result for result, _ in told]


def _beside(asked: bool | str, size: int) -> tuple[bool, str]:
    """Whether checkpoints are written beside training, the same on all ranks, and what to say about it."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, (size, host.memory()[1] / local))
    largest = max(size for size, _ in told) / 2**20
    copy = f"a copy of {largest / 1024:,.1f} GiB a rank" if largest > 1024 else f"a copy of {largest:,.0f} MiB a rank"
    if asked is False:
        return False, "training waits while one is written"
    if asked == "auto" and any(size > free / 2 for size, free in told):
        less = "checkpoint.asynchronous=true takes it all the same"
        return False, f"training waits while one is written: {copy} is more than half of the free memory ({less})"
    return True, f"written beside training from {copy} in host memory"
