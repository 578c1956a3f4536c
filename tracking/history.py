"""metrics.jsonl: one JSON object a line, for every step and every evaluation of a run.

A line has `step` (0 for the evaluation before the first step), `tokens` and the metrics of tracking.metrics. JSON knows
no NaN and no infinity; they are written as the strings "NaN", "Infinity" and "-Infinity".
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from tracking import whole

FILE = "metrics.jsonl"


class History:
    """Starts the file anew, or after step `done`, and appends lines; each is in the file, complete, when `add` returns.

    Nothing is lost or doubled when a signal interrupts `add` (call `flush` then), nor when the disk is full: the lines
    stay in memory and are written as soon as there is room. Then `problem` says why they are not in the file.
    """

    def __init__(self, run_dir: Path, done: int = 0):
        """Keeps what an interrupted run has in the file up to step `done`, in `kept`.

        Raises OSError when the folder cannot be written to.
        """
        self.path = run_dir / FILE
        self.kept = [line for line in read(run_dir) if line["step"] <= done] if done else []
        self.problem: str | None = None
        # Not emptied and written again: a kill in between would lose what is kept.
        whole.write(self.path, b"".join(_encoded(line) for line in self.kept))
        self._fd = os.open(self.path, os.O_WRONLY)
        self._end = self.path.stat().st_size
        self._pending = b""

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Writes one line."""
        self._pending += _encoded({"step": step} | metrics)
        self.flush()

    def flush(self) -> None:
        """Writes the lines that are not in the file yet."""
        try:
            while self._pending:
                # At a fixed position: a write that a signal interrupts after the fact is repeated with the same bytes.
                written = os.pwrite(self._fd, self._pending, self._end)
                self._pending, self._end = self._pending[written:], self._end + written
            self.problem = None
        except OSError as error:
            self.problem = f"{self.path} cannot be written: {error.strerror}"

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self.flush()
        os.close(self._fd)


def read(run_dir: str | Path) -> Iterator[dict[str, float]]:
    """The lines of a run's metrics.jsonl, none when there is no file.

    A last line that was cut off is left out; anything else that is no JSON object of numbers with a whole `step` raises
    ValueError.
    """
    path = Path(run_dir) / FILE
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                try:
                    found = {name: _number(value) for name, value in json.loads(line).items()}
                    found["step"] = int(found["step"])
                except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
                    raise ValueError(f"{path}: line {number} is damaged: {_said(error)}") from error
                yield found


def _encoded(line: dict[str, float]) -> bytes:
    return json.dumps({name: _plain(value) for name, value in line.items()}).encode() + b"\n"


def _plain(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(value: float | str) -> float:
    if isinstance(value, int | float):
        return value
    if isinstance(value, str):
        return float(value)
    raise TypeError(f"{value} is no number")


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return "it has no step"
    return "it is no JSON object" if isinstance(error, AttributeError) else str(error)
