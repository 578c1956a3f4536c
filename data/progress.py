"""How far a preparation is: a bar on a terminal, elsewhere a line now and then."""

import os
import sys
import time
from pathlib import Path

EVERY_S = 10.0


class Progress:
    """Counts the bytes that were read of some files on disk. Use as a context."""

    def __init__(self, label: str, files: list[Path]):
        self.label, self.total = label, sum(os.path.getsize(file) for file in files)
        self.done, self.of_file = 0, {}
        self.began = self.told = time.monotonic()
        self._bar = None

    def __enter__(self):
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = ("{task.description}", BarColumn(), TaskProgressColumn(), TransferSpeedColumn())
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=2)
            self._task = self._bar.add_task(self.label, total=self.total)
            self._bar.start()
        return self

    def __exit__(self, *error):
        if self._bar:
            self._bar.stop()

    def read(self, file: str, to: int) -> None:
        """A file was read up to a byte."""
        self.done += to - self.of_file.get(file, 0)
        self.of_file[file] = to
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self.done)
        elif now - self.told >= EVERY_S:
            self.told, speed = now, self.done / (now - self.began)
            left = (self.total - self.done) / speed
            print(
                f"{self.label}  {self.done / self.total:.0%}  {speed / 1e6:.1f} MB/s  {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
