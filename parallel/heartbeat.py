"""Signs of life: each rank overwrites one small file as it moves; a watcher says who stands where when nobody does."""

import os
import sys
import threading
import time
from pathlib import Path

QUIET_S = 30.0
LOOK_S = 1.0
_LINE = 80


def _file(run_dir: str | Path, rank: int) -> Path:
    return Path(run_dir) / "ranks" / f"rank{rank}.beat"


class Heartbeat:
    """A rank's side. `beat("step 12 forward")` costs one 80-byte write to an open file, about 2 microseconds."""

    def __init__(self, run_dir: str | Path, rank: int):
        path = _file(run_dir, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._count = 0

    def beat(self, phase: str) -> None:
        """Say that this rank is alive and enters `phase`; every rank must go through the same phases."""
        self._count += 1
        line = f"{self._count} {phase}".encode()[: _LINE - 1]
        os.pwrite(self._fd, line.ljust(_LINE - 1) + b"\n", 0)


class Watch:
    """The watcher's side, in the parent or in one attached rank. Compares contents only: clocks of nodes may differ."""

    def __init__(self, run_dir: str | Path, world_size: int, quiet_s: float = QUIET_S):
        self._files = [_file(run_dir, rank) for rank in range(world_size)]
        self._beats: list[tuple[int, str]] = [(0, "start-up")] * world_size
        self._moved = time.monotonic()
        self._quiet_s = quiet_s
        self._longest = 0.0  # the longest pause that this run has got over
        self._patience = quiet_s

    def look(self) -> float | None:
        """Read all beats; the seconds for which no rank has moved when that is worth saying, else None.

        It is after `quiet_s` seconds, or four times the longest pause so far, and then at doubling intervals.
        """
        now = time.monotonic()
        beats = [_read(file) or beat for file, beat in zip(self._files, self._beats, strict=True)]
        quiet = now - self._moved
        if beats != self._beats:
            self._beats, self._moved, self._longest = beats, now, max(self._longest, quiet)
            self._patience = max(self._quiet_s, 4 * self._longest)
            return None
        if quiet < self._patience:
            return None
        self._patience = 2 * quiet
        return quiet

    def positions(self, places: dict[int, str] | None = None) -> str:
        """Where each rank stands: those behind the others first, then the smallest group, for there lies the cause.

        places: the line of code a rank is in, where it is known.
        """
        groups: dict[tuple[int, str, str], list[int]] = {}
        for rank, (count, phase) in enumerate(self._beats):
            groups.setdefault((count, phase, (places or {}).get(rank, "")), []).append(rank)
        ordered = sorted(groups.items(), key=lambda group: (group[0][0], len(group[1])))
        return "; ".join(
            f"{_ranks(ranks)} in '{phase}'" + (f" at {place}" if place else "") for (_, phase, place), ranks in ordered
        )


def watch_in_background(run_dir: str | Path, world_size: int, several_nodes: bool) -> Watch:
    """Print on stderr, for the life of this process, when nothing moves; for runs without a parent of ours."""
    # A network file system shows what another node wrote up to half a minute late.
    watch = Watch(run_dir, world_size, quiet_s=3 * QUIET_S if several_nodes else QUIET_S)

    def look() -> None:
        while True:
            time.sleep(LOOK_S)
            if quiet := watch.look():
                print(f"nothing has moved for {quiet:.0f} s: {watch.positions()}", file=sys.stderr, flush=True)

    threading.Thread(target=look, name="heartbeats", daemon=True).start()
    return watch


def _read(file: Path) -> tuple[int, str] | None:
    try:
        count, _, phase = file.read_text(errors="replace").strip().partition(" ")
    except FileNotFoundError:
        return None
    return (int(count), phase) if count.isdigit() else None


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
