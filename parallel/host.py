"""What this machine gives a run: cores and memory, as a container or batch job limits them. Standard library only."""

import functools
import os
import resource
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores this process may use: its affinity, cut down by a container's quota where there is one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit, _, period = _read(_CGROUP / "cpu.max").partition(" ")  # control groups, version 2
    if limit.isdigit() and period.isdigit():
        return max(1, min(allowed, int(limit) // int(period)))
    return allowed


def memory() -> tuple[int, int]:
    """Bytes of memory: what this process may use in all, and what is available now."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, available = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):  # counts what the page cache would give back
            available = int(line.split()[1]) * 1024
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit))
        available = min(available, total - int(used))
    return total, max(0, available)


@functools.cache
def _statm() -> int | None:
    """This process's file of sizes, kept open: opening it takes ten times as long as reading it."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None


def resident() -> int:
    """Bytes of its own that this process has in memory now; on systems without /proc the most it has had.

    Pages of files (libraries, token files) are not its own: the system takes them back when it needs them.
    """
    if (file := _statm()) is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    _, resident, shared, *_ = os.pread(file, 100, 0).split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _read(file: Path) -> str:
    """A kernel file's text; empty where this kernel has no such file."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
