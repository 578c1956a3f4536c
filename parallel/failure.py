"""Why a run failed: the first cause among ranks that die one of another, in one line, and the status it means."""

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from parallel.rank_process import lost_peers, waited_in_vain

_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|MemoryError|out of memory|can't allocate memory|Cannot allocate memory")
_NOT_FINITE = re.compile(r"^FloatingPointError")
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")
_LONGEST = 300
_TAIL = 65536


@dataclass
class Ended:
    """How one rank ended: exit code (negative: the signal) and the time at which it was seen, in epoch seconds."""

    rank: int
    code: int
    at: float
    # Whether another machine, on which it ran, has killed for lack of memory since; None for a rank of this machine.
    out_of_memory: bool | None = None


@dataclass
class Cause:
    """The first cause of a failed run: status as in result.json, and one line that names the rank and its log."""

    status: str
    line: str


def oom_kills() -> int | None:
    """Processes that this machine's kernel has killed for lack of memory since it started; None where it can't say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) if found else None


def first_cause(
    ended: list[Ended], ranks_dir: Path, oom_kills_before: int | None, standing: str | None = None
) -> Cause:
    """Choose among the ranks that failed: own errors before those caused by a peer's end, then the earliest.

    ended: ranks with a non-zero exit code that were not stopped by us. ranks_dir: holds `rank<N>.log` and
    `rank<N>.error.json`. oom_kills_before: `oom_kills()` when the run started. standing: where every rank stood when
    the first failed (parallel.heartbeat.Watch.positions), for a collective that waited in vain.
    """
    found = []
    for end in ended:
        message, at = _recorded(ranks_dir / f"rank{end.rank}.error.json")
        if message is None:
            message, at = _told(end, ranks_dir / f"rank{end.rank}.log"), end.at
        found.append((lost_peers(message), at, end, message))
    _, _, end, message = min(found, key=lambda entry: entry[:2])
    status = "oom" if _OUT_OF_MEMORY.search(message) else "nan" if _NOT_FINITE.search(message) else "failed"
    if end.code == -signal.SIGKILL:
        status, message = _killed(oom_kills_before, end.out_of_memory)
    log = ranks_dir / f"rank{end.rank}.log"
    if waited_in_vain(message) and standing:
        # The one that complains did come; the cause lies with the one that is behind.
        line = f"a collective waited in vain: {standing}; rank {end.rank} gave up: {_one_line(message)}"
        return Cause("timeout", f"{line} (log: {short(log)})")
    # All ranks say the same then, and name the rank themselves.
    who = "" if status == "nan" and " on rank " in message else f"rank {end.rank}: "
    return Cause(status, f"{who}{_one_line(message)} (log: {short(log)})")


def _recorded(file: Path) -> tuple[str | None, float]:
    """Message and time (the file's own: the time inside it has whole seconds only) of a recorded exception."""
    try:
        message = json.loads(file.read_text())["message"]
        return (message if isinstance(message, str) else message["message"]), file.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):  # none, or the rank died while writing it
        return None, 0.0


def _told(end: Ended, log: Path) -> str:
    """What the exit code says, after the error line of a traceback at the end of the log when there is one."""
    code = f"killed by {signal.Signals(-end.code).name}" if end.code < 0 else f"exit code {end.code}"
    if end.code - 128 in (signal.SIGTERM, signal.SIGINT):  # parallel.rank_process ends a stopped rank like this
        return f"stopped from outside by {signal.Signals(end.code - 128).name}"
    text = log.read_bytes()[-_TAIL:].decode(errors="replace") if log.exists() else ""
    _, traceback, after = text.rpartition("Traceback (most recent call last):")
    if traceback:
        for line in after.splitlines()[1:]:
            if _ERROR_LINE.match(line):
                return line
    thrown = re.search(r"terminate called after throwing an instance of.*\n\s*what\(\):\s*(.*)", text)
    return f"{code}: {thrown.group(1)}" if thrown else code


def _killed(oom_kills_before: int | None, elsewhere: bool | None) -> tuple[str, str]:
    now = oom_kills()
    if elsewhere is None and (oom_kills_before is None or now is None):
        return "oom", "killed by SIGKILL, which nobody here sent: likely the kernel, out of memory"
    if now > oom_kills_before if elsewhere is None else elsewhere:
        return "oom", "killed by SIGKILL: the kernel ran out of memory"
    return "failed", "killed by SIGKILL from outside (the kernel counts no kill for lack of memory)"


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def short(path: Path) -> str:
    """The path as a user in this folder would type it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
