"""One rank's output, live on this process's console and, without the moving parts, in a log file.

The rank gets what this process has: a terminal stays a terminal (through a pseudo-terminal of the same size, so that
a progress bar works), a pipe stays a pipe. Everything is caught at the descriptor, C++ messages included.
"""

import fcntl
import os
import re
import select
import signal
import termios
import threading
import time
from pathlib import Path

_CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_UP = b"\x1b[1A"
_HELD = 8  # lines of a progress bar at most
_SHOW_CURSOR = b"\x1b[?25h"
_CHUNK = 4096  # bytes a pipe takes without blocking once it is writable (PIPE_BUF)


class _Stream:
    """One of stdout and stderr (or both in one): the rank writes `rank_fd`, we read `fd` and write `out_fd`."""

    def __init__(self, out_fd: int):
        self.out_fd = out_fd
        self.terminal = os.isatty(out_fd)
        if self.terminal:
            self.fd, self.rank_fd = os.openpty()
            attributes = termios.tcgetattr(self.rank_fd)
            attributes[1] &= ~termios.OPOST  # the real terminal translates line ends
            termios.tcsetattr(self.rank_fd, termios.TCSANOW, attributes)
            self.resize()
        else:
            self.fd, self.rank_fd = os.pipe()
        self.open = True
        self.pending = b""  # read from the rank, not yet written to the console
        self.line = b""  # the unfinished line of the log
        self.held: list[bytes] = []  # finished ones that may still be overwritten
        self.hold = 0

    def resize(self) -> None:
        if self.terminal:
            size = fcntl.ioctl(self.out_fd, termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)

    def read(self) -> bytes:
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # a pseudo-terminal says EIO when its last writer has gone
            data = b""
        self.open = bool(data)
        return data

    def plain(self, data: bytes, end: bool = False) -> bytes:
        """Lines completed by `data`, as they looked in the end: no control sequences, nothing that was overwritten.

        Once the rank has gone back up over lines (a progress bar of several lines), the last few are held back.
        """
        *lines, rest = (self.line + data).split(b"\n")
        if end and rest:
            lines, rest = [*lines, rest], b""
        kept = rest.rstrip(b"\r").rpartition(b"\r")[2]
        self.line = kept + b"\r" if rest.endswith(b"\r") else kept
        for line in lines:
            if ups := line.count(_UP):
                self.hold = _HELD
                del self.held[-ups:]
            self.held.append(_CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2]) + b"\n")
        sure = len(self.held) if end else max(0, len(self.held) - self.hold)
        done, self.held = self.held[:sure], self.held[sure:]
        return b"".join(done)


class Console:
    """Pass one rank's output on. Start the rank with `stdout` and `stderr`, call `started`, `pump` often, `close`."""

    def __init__(self, log: Path):
        self._log = log.open("wb", buffering=0)
        shared = os.path.sameopenfile(1, 2) or (os.isatty(1) and os.isatty(2))
        self._streams = [_Stream(1)] if shared else [_Stream(1), _Stream(2)]
        self.stdout = self._streams[0].rank_fd
        self.stderr = self._streams[-1].rank_fd
        self._old_resize = None
        if any(s.terminal for s in self._streams) and threading.current_thread() is threading.main_thread():
            self._old_resize = signal.signal(signal.SIGWINCH, lambda *_: [s.resize() for s in self._streams])

    def started(self) -> None:
        """The rank has its ends: let go of ours, so that its end is seen."""
        for stream in self._streams:
            os.close(stream.rank_fd)

    def pump(self, timeout_s: float) -> bool:
        """Move what is there; waits up to `timeout_s` for something. True when something moved."""
        # While the console takes nothing, nothing more is read: the rank feels the same back pressure as without us.
        reads = [s.fd for s in self._streams if s.open and not s.pending]
        writes = [s.out_fd for s in self._streams if s.pending]
        if not reads and not writes:
            time.sleep(timeout_s)
            return False
        readable, writable, _ = select.select(reads, writes, [], timeout_s)
        for stream in self._streams:
            if stream.fd in readable:
                data = stream.read()
                self._log.write(stream.plain(data))
                if stream.out_fd is not None:
                    stream.pending += data
            if stream.out_fd in writable:
                self._forward(stream)
        return bool(readable or writable)

    def _forward(self, stream: _Stream) -> None:
        try:
            stream.pending = stream.pending[os.write(stream.out_fd, stream.pending[:_CHUNK]) :]
        except OSError as error:  # the reader of our output is gone (`| head`, a closed terminal); the run goes on
            self._log.write(f"console lost ({error}); output continues here only\n".encode())
            stream.pending, stream.out_fd = b"", None

    def close(self, patience_s: float | None = None) -> None:
        """Pass on what is left; wait at most `patience_s` for a console that takes nothing (None: for ever)."""
        until = None if patience_s is None else time.monotonic() + patience_s
        while self.pump(0) or any(s.pending for s in self._streams):
            if until is not None and time.monotonic() > until:
                break
        for stream in self._streams:
            self._log.write(stream.plain(b"", end=True))
            os.close(stream.fd)
            if stream.terminal and stream.out_fd is not None:
                os.write(stream.out_fd, _SHOW_CURSOR)  # a killed progress bar leaves it hidden
        self._log.close()
        if self._old_resize is not None:
            signal.signal(signal.SIGWINCH, self._old_resize)
