"""Signals that end a program, as exceptions, so that what it began is ended in order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_exceptions(*signums: int) -> Iterator[None]:
    """While this is open, each of these signals raises SystemExit(128 + its number); ignored ones stay ignored."""

    def leave(signum, frame):
        raise SystemExit(128 + signum)

    old = {n: signal.signal(n, leave) for n in signums if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
