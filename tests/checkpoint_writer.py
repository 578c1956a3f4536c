"""Writes small checkpoints, one after the other, until it is killed."""

import itertools
import os
import sys
from pathlib import Path

from parallel import checkpoint_files


def commit(folder: Path, step: int, keep: int) -> None:
    """One checkpoint of random content."""
    unfinished = checkpoint_files.begin(folder, step)
    (unfinished / "data").write_bytes(os.urandom(1 << 16))
    known = {"data": checkpoint_files.fingerprint(unfinished / "data")}
    checkpoint_files.commit(unfinished, {"step": step, "files": known}, keep)


if __name__ == "__main__":
    print("begun", flush=True)
    for number in itertools.count(int(sys.argv[2])):
        commit(Path(sys.argv[1]), number, keep=2)
