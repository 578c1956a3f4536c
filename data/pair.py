"""The files that data.prepare leaves, written so that they are there as a whole or not at all.

They grow in PREFIX.unfinished/ and are renamed at the end, the index last: without PREFIX.idx nobody takes the others
for token files. Whatever ends a process before that leaves at most that folder, which the next one clears.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path

from data.corpus import BadData
from parallel.checkpoint_files import sync

ENDS = (".bin", ".json", ".idx")


class Pair:
    """PREFIX.bin, .json and .idx and a copy of the tokenizer, in the making. Use as a context; `publish` at the end."""

    def __init__(self, prefix: str, overwrite: bool):
        self.prefix, self.folder = prefix, Path(f"{prefix}.unfinished")
        there = [f"{prefix}{end}" for end in ENDS if os.path.exists(f"{prefix}{end}")]
        if there and not overwrite:
            raise BadData(f"output={prefix}: {there[0]} is there already; take another, or add overwrite=true.")

    def __enter__(self):
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise BadData(f"output={self.prefix} is being written by another process.") from error
        except OSError as error:
            raise BadData(f"output={self.prefix} cannot be written: {error.strerror} ({error.filename}).") from error
        for old in self.folder.iterdir():
            old.unlink()
        return self

    def __exit__(self, *error):
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def path(self, end: str) -> Path:
        """Where the file that will be PREFIX + `end` is written."""
        return self.folder / f"tokens{end}"

    def publish(self, record: dict) -> None:
        """Everything is written but the record: make it last, and appear."""
        self.path(".json").write_text(json.dumps(record, indent=2) + "\n")
        ends = sorted((file.name.removeprefix("tokens") for file in self.folder.iterdir()), key=".idx".__eq__)
        for end in ends:
            sync(self.path(end))
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)  # an old one does not fit the new tokens
        for end in ends:
            os.replace(self.path(end), f"{self.prefix}{end}")
        sync(Path(self.prefix).absolute().parent)
