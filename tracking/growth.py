"""Notices memory that grows from step to step, before it runs out: the mark of something that keeps every step's graph.

What is watched is what is held between two steps, not the most there ever was: a run that once needed much is well, one
that holds a little more after every step is not.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from tracking import result

BLOCK, BLOCKS = 10, 6  # steps in a block, blocks that are compared
LEAST = 32 * 2**20  # bytes in all blocks together: below it is noise of a CPU's allocator
EVEN = 0.4  # the smallest step from block to block against the middle one
SHARE = 0.1  # of what is held


class Growth:
    """One rank's memory. `room()` tells the bytes that are left."""

    def __init__(self, run_dir: Path, rank: int, room: Callable[[], int]):
        self.file = (Path(run_dir) / result.DOCTOR, f"memory-rank{rank}.json")
        self.rank, self.room = rank, room
        self.block: list[int] = []
        self.floors: deque[int] = deque(maxlen=BLOCKS)
        self.warned = False

    def add(self, step: int, held: int, last_step: int) -> str | None:
        """Take what is held after a step; a sentence, once, when it grows steadily and will not fit or is no trifle."""
        self.block.append(held)
        if len(self.block) < BLOCK:
            return None
        self.floors.append(min(self.block))
        self.block.clear()
        grown = None if self.warned else steady(list(self.floors))
        if grown is None:
            return None
        a_step, room = grown / (BLOCK * (BLOCKS - 1)), self.room()
        lasts = int(room / a_step)
        if lasts > last_step - step and grown < SHARE * held:
            return None
        self.warned = True
        mib = a_step / 2**20
        folder, name = self.file
        folder.mkdir(parents=True, exist_ok=True)
        result.write(folder, name, rank=self.rank, step=step, mib_per_step=mib, held_gib=held / 2**30, steps_left=lasts)
        end = f"enough for about {lasts:,} more steps" if lasts <= last_step - step else "enough until the last step"
        return (
            f"WARNING: the memory of rank {self.rank} grows by {mib:.1f} MiB with every step (now {held / 2**30:.2f} "
            f"GiB, {end}): something keeps each step's graph or output, such as a loss added up without .item()."
        )


def steady(floors: list[int]) -> int | None:
    """Bytes by which the least of each block grew in all, when it grew evenly in every block; else None."""
    if len(floors) < BLOCKS:
        return None
    steps = [b - a for a, b in zip(floors, floors[1:], strict=False)]
    grown = floors[-1] - floors[0]
    even = min(steps) >= EVEN * sorted(steps)[len(steps) // 2]
    return grown if min(steps) > 0 and even and grown >= LEAST else None
