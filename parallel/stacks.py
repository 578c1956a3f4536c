"""The line of code in which a rank stands, asked from outside; also from a rank that waits inside a C++ collective."""

import faulthandler
import os
import re
import signal
from pathlib import Path

FILE_VARIABLE = "TRIPOD_STACK_FILE"  # set by parallel.ranks in the environment of the ranks it starts
_SIGNAL = signal.SIGUSR1
_ROOT = str(Path(__file__).resolve().parent.parent)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_file = None  # faulthandler writes to it for the life of the process


def answer() -> None:
    """A rank's side: from now on, write the stacks of all threads to the file that the parent named, when asked."""
    global _file
    if path := os.environ.get(FILE_VARIABLE):
        _file = open(f"{path}.tmp", "a")
        # What faulthandler puts back when the interpreter ends: a question that comes then must not end the process.
        signal.signal(_SIGNAL, signal.SIG_IGN)
        faulthandler.register(_SIGNAL, file=_file, all_threads=True)
        os.rename(_file.name, path)  # only now may we be asked


def ask(pid: int, file: Path) -> None:
    """The parent's side: let the process write its stacks to `file`, a moment later. Does nothing to one that can't."""
    if file.exists():  # the rank has called `answer`; before, the signal would end it
        os.truncate(file, 0)
        os.kill(pid, _SIGNAL)


def place(file: Path) -> str:
    """Where the main thread stands, as `file:line function` of this project's innermost frame, and what it calls."""
    text = file.read_text(errors="replace") if file.exists() else ""
    threads = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    frames = _FRAME.findall(threads[-1])  # the main thread is the oldest and comes last
    if not frames:
        return ""
    own = next((frame for frame in frames if _is_own(frame[0])), frames[0])
    path, line, function = own
    inner = f" in {frames[0][2]}" if frames[0] != own else ""
    return f"{path.removeprefix(_ROOT + os.sep)}:{line} {function}{inner}"


def _is_own(path: str) -> bool:
    return path.startswith(_ROOT) and "site-packages" not in path and Path(path).name != "rank_process.py"
