"""Signs of life: each rank overwrites one small file as it moves, and a watcher names the rank that stays behind."""

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

    def close(self) -> None:
        os.close(self._fd)


class Watch:
    """The watcher's side, in the parent or in one attached rank. Compares contents only: clocks of nodes may differ."""

    def __init__(self, run_dir: str | Path, world_size: int, quiet_s: float = QUIET_S):
        self._files = [_file(run_dir, rank) for rank in range(world_size)]
        self._beats: list[tuple[int, str]] = [(0, "start")] * world_size
        self._moved = [time.monotonic()] * world_size
        self._quiet_s = quiet_s
        self._longest_gap = 0.0
        self._patience = 0.0

    def look(self) -> str | None:
        """Read all beats; a sentence when nothing has moved for long, at doubling intervals, else None.

        Long is `quiet_s` seconds, or four times the longest pause that this run has got over so far.
        """
        now = time.monotonic()
        last = max(self._moved)
        moved = False
        for rank, file in enumerate(self._files):
            beat = _read(file)
            if beat is not None and beat != self._beats[rank]:
                self._beats[rank], self._moved[rank], moved = beat, now, True
        if moved:
            self._longest_gap = max(self._longest_gap, now - last)
            self._patience = 0.0
            return None
        self._patience = self._patience or max(self._quiet_s, 4 * self._longest_gap)
        if now - last < self._patience:
            return None
        self._patience *= 2
        return f"nothing has moved for {now - last:.0f} s: {self.silent()}"

    def silent(self) -> str:
        """Which ranks are behind the others, in which phase and for how long; or that all are in the same place."""
        now = time.monotonic()
        front = max(count for count, _ in self._beats)
        behind = [rank for rank, (count, _) in enumerate(self._beats) if count < front]
        if not behind:
            return f"all {len(self._beats)} ranks are in '{self._beats[0][1]}'"
        ahead = next(phase for count, phase in self._beats if count == front)
        names = [f"rank {r} in '{self._beats[r][1]}' for {now - self._moved[r]:.0f} s" for r in behind[:4]]
        more = f" and {len(behind) - 4} more" if len(behind) > 4 else ""
        return f"behind: {', '.join(names)}{more}; the others wait in '{ahead}'"


def watch_in_background(run_dir: str | Path, world_size: int, several_nodes: bool) -> None:
    """Print on stderr, for the life of this process, what a `Watch` has to say; for runs without a parent of ours."""
    # A network file system shows what another node wrote up to half a minute late.
    watch = Watch(run_dir, world_size, quiet_s=3 * QUIET_S if several_nodes else QUIET_S)

    def look() -> None:
        while True:
            time.sleep(LOOK_S)
            if sentence := watch.look():
                print(sentence, file=sys.stderr, flush=True)

    threading.Thread(target=look, name="heartbeats", daemon=True).start()


def _read(file: Path) -> tuple[int, str] | None:
    try:
        count, _, phase = file.read_text(errors="replace").strip().partition(" ")
    except FileNotFoundError:
        return None
    return (int(count), phase) if count.isdigit() else None
