"""What every rank does before anything else: die with its parent, stop on a signal, leave its error where it is found.

Nothing here imports torch, so a rank is protected during the seconds that importing it takes.
"""

import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from parallel import stacks

PARENT_PID = "TRIPOD_PARENT_PID"  # set by parallel.launch in the environment of the ranks it starts
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's name and format; parallel.launch uses the same
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE_S = 2.0
LAST_STEP_S = 30.0  # for a step in progress and a last checkpoint

_PR_SET_PDEATHSIG = 1
_last_words: list[Callable[[int], None]] = []
_between_steps = False  # whether the training loop itself looks for signals, so as to stop between two steps
_asked = 0  # the signal it has not looked at yet
_error_files: list[Path] = []  # further ones than the launcher's
_elsewhere: Callable[[], tuple[str, str] | None] | None = None

# What a collective says when it was another rank that broke or stood still.
_LOST_PEERS = re.compile(
    r"^(RuntimeError|DistBackendError|DistNetworkError|DistStoreError|Stopped)\b.*?(closed by peer|reset by peer"
    r"|broken pipe|socket closed|remote process exited|ncclRemoteError|ncclSystemError|recvValue failed"
    r"|failed to recv|sendBytes failed|watchdog caught collective|timed out waiting|wait timeout|stopped by)",
    re.IGNORECASE | re.DOTALL,
)
_IN_VAIN = re.compile(r"watchdog caught collective|timed out waiting|wait timeout", re.IGNORECASE)


class Stopped(BaseException):
    """A signal asked this rank to stop. Not an Exception, so that no `except Exception` files it as a failure."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the process that started this one ends, however it ends (Linux; else no effect).

    A rank lives in a session of its own, so nothing else would reach it when its parent is killed with SIGKILL.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    expected = os.environ.get(PARENT_PID)
    if expected and os.getppid() != int(expected):  # the parent ended before prctl: no signal will come
        os._exit(128 + signal.SIGKILL)


def last_words(say: Callable[[int], None]) -> None:
    """Register what is called, with the signal's number, when the main thread cannot react to the signal itself.

    It runs in another thread and is followed by the end of the process: close W&B and files here, nothing more.
    """
    _last_words.append(say)


def stop_between_steps() -> Callable[[], int]:
    """From now on a signal is only remembered; the function that is returned tells its number, 0 for none.

    For a loop that has something to finish first. It has LAST_STEP_S for the step it is in and for what it finishes;
    whoever sent the signal has to be as patient.
    """
    global _between_steps
    _between_steps = True
    return lambda: _asked


def stop_at_once() -> None:
    """From now on a signal stops this rank where it is, as before `stop_between_steps`."""
    global _between_steps
    _between_steps = False
    if _asked:
        raise Stopped(_asked)


def stop_after(seconds: float) -> None:
    """Stop this rank after `seconds`, as SIGTERM would; for a rank whose launcher does not know train.timeout_s."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()


def ask_elsewhere(why: Callable[[], tuple[str, str] | None]) -> None:
    """Register who knows status and cause of a run whose end this rank sees only as a signal or as lost peers."""
    global _elsewhere
    _elsewhere = why


def elsewhere(error: BaseException | None) -> tuple[str, str] | None:
    """Status and cause that lie outside this rank, when `error` is their consequence and somebody knows them."""
    lost = isinstance(error, Exception) and lost_peers(f"{type(error).__name__}: {error}")
    return _elsewhere() if _elsewhere and (lost or isinstance(error, Stopped)) else None


def stop_on_signals(patience_s: float = PATIENCE_S) -> None:
    """Turn the first SIGTERM or SIGINT into `Stopped`, raised in the main thread; later ones are ignored.

    Python runs a handler only between two bytecodes, so a rank that waits in a C++ collective never sees the signal.
    A thread hears it at once through the wakeup descriptor; when the main thread has not reacted after `patience_s`
    seconds, it says the last words and ends the process.
    """
    reacted = threading.Event()

    def on_signal(signum: int, frame) -> None:
        global _asked
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        if _between_steps:
            _asked = signum
            return
        reacted.set()
        raise Stopped(signum)

    def wait_for_signal() -> None:
        while (signum := os.read(heard, 1)[0]) not in STOP_SIGNALS:
            pass
        patience = LAST_STEP_S if _between_steps else patience_s
        if reacted.wait(patience) or signal.getsignal(signum) is not on_signal:  # or another owner took over
            return
        print(f"{Stopped(signum)} inside a call that does not return; ending the process", file=sys.stderr, flush=True)
        for say in _last_words:
            try:
                say(signum)
            except Exception:  # whatever it is, the process must still end
                traceback.print_exc()
        os._exit(128 + signum)

    heard, hear = os.pipe()
    os.set_blocking(hear, False)
    signal.set_wakeup_fd(hear, warn_on_full_buffer=False)
    for signum in STOP_SIGNALS:
        signal.signal(signum, on_signal)
    threading.Thread(target=wait_for_signal, name="stop-on-signal", daemon=True).start()


def log_to_file(run_dir: str | Path, rank: int) -> None:
    """Send this process's stdout and stderr, including those of C++ code, to the rank's log; for attached ranks."""
    path = Path(run_dir) / "ranks" / f"rank{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def lost_peers(message: str) -> bool:
    """Whether an error, as `Type: text`, says that another rank is gone or silent, so that the cause lies there."""
    return bool(_LOST_PEERS.search(message))


def waited_in_vain(message: str) -> bool:
    """Whether an error says that a collective took longer than it may: some rank did not come."""
    return bool(_IN_VAIN.search(message))


def record_in(path: Path) -> None:
    """Have an exception written to this file too; for a rank whose launcher is not ours."""
    _error_files.append(path)


def record(error: Exception) -> None:
    """Write an exception where the launcher (ours or torchrun) looks for the first cause, in torchrun's format."""
    info = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": info}
    launchers = os.environ.get(ERROR_FILE)
    for path in (Path(launchers), *_error_files) if launchers else _error_files:
        if not (path.exists() and path.stat().st_size):  # else it is written already, nearer to the cause
            path.write_text(json.dumps({"message": message}))


def run(main: Callable, *args) -> None:
    """Run `main(*args)` as a rank: protected, stoppable, its exception recorded. Imports belong inside `main`.

    A rank that fails or is stopped (exit code 128 + signal number) ends here and now, without the interpreter's
    clean-up: taking down a communicator whose peers are gone can wait for ever.
    """
    die_with_parent()
    stop_on_signals()
    faulthandler.enable()
    stacks.answer()
    try:
        main(*args)
        return
    except Stopped as stopped:
        # Rank 0's tracker has said so on the console.
        code, report = 128 + stopped.signum, str(stopped) if os.environ.get("RANK") != "0" else ""
    except Exception as error:
        for signum in STOP_SIGNALS:  # the launcher stops everybody as soon as one fails; let this report be written
            signal.signal(signum, signal.SIG_IGN)
        record(error)
        code, report = 1, f"{type(error).__name__}: {error}"
        if not lost_peers(report) and not getattr(error, "is_sentence", False):
            traceback.print_exc()
            report = ""
    if report:
        print(f"rank {os.environ.get('RANK', 0)}: {report}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
