"""One W&B run per training run, whose offline file is readable whatever ends the process.

W&B writes its file every 15 seconds by default and loses what came after when the process is killed; here it is every
half second. A thread hands steps over, because one call to W&B waits up to several milliseconds for another thread and
process. Together, a SIGKILL costs at most the last second; any other end costs nothing.
"""

import hashlib
import os
import re
import threading
import time
from collections import deque
from pathlib import Path

from omegaconf import OmegaConf

from tracking.mode import TrackingError, decide, server
from tracking.result import NAMED, named, plain

HAND_OVER_S = 0.5
FLUSH_S = 0.5
INIT_TIMEOUT_S = 20
FINISH_TIMEOUT_S = 60


def sweep_of(run_dir: Path) -> Path | None:
    """The sweep's folder, when Hydra made `run_dir` as a point of a sweep."""
    file = run_dir / ".hydra" / "hydra.yaml"
    if file.exists() and OmegaConf.load(file).hydra.mode == "MULTIRUN":
        return run_dir.parent
    return None


def identity(run_dir: Path, choices: dict[str, str]) -> dict:
    """The fields by which W&B groups and finds runs. All points of a sweep share one group and one folder of files."""
    run_dir = run_dir.absolute()
    sweep = sweep_of(run_dir)
    unique = f"{run_dir.parent.name}-{run_dir.name}"
    if sweep:
        unique = f"{sweep.name}-{run_dir.name.partition('_')[0]}"
    unique = re.sub(r"[^\w.-]", "-", unique)
    if len(unique) > 128:  # W&B's limit
        unique = unique[:115] + "-" + hashlib.sha256(unique.encode()).hexdigest()[:12]
    return {
        "id": unique,
        "name": "-".join(named(choices)).replace(" ", "") or run_dir.name,
        "group": sweep.name if sweep else None,
        "job_type": "train",
        "tags": [f"{group}={choices[group]}"[:64] for group in NAMED if choices.get(group)],
        "dir": str(sweep or run_dir),
    }


class WandbRun:
    """A W&B run. `mode` and `reason` say how it is used; `folder` is where its files are, None when disabled."""

    def __init__(self, frozen, run_dir: Path, facts: dict):
        """Starts the run. Raises TrackingError when W&B cannot be used in the way that was asked for."""
        asked = str(frozen.cfg.tracking.mode.value)
        self.mode, self.reason = decide(asked)
        self.folder: Path | None = None
        self.url: str | None = None
        self.problem: str | None = None
        self._run, self._waiting = None, deque()
        if self.mode == "disabled":
            return
        # Error reports to W&B's makers need a network and the user's consent; what W&B says is said here, in its place.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb
        except ImportError as error:
            if asked != "auto":
                raise TrackingError(f"tracking.mode={asked} needs wandb, which cannot be imported: {error}") from error
            self.mode, self.reason = "disabled", f"wandb cannot be imported: {error}"
            return
        about = {name: value for name, value in facts.items() if name != "choices"}
        config = {name: vars(group) for name, group in vars(frozen.cfg).items()}
        config = plain(config | {"choices": frozen.choices, "facts": about})
        fields = {"project": frozen.cfg.tracking.project, "config": config, **identity(run_dir, frozen.choices)}
        try:
            self._start(wandb, asked, fields)
        except (wandb.errors.Error, OSError) as error:
            raise TrackingError(f"W&B cannot start ({_line(error)}); tracking.mode=disabled does without.") from error
        self.folder, self.url = Path(self._run.dir).parent, self._run.url if self.mode == "online" else None
        self._run.define_metric("tokens", hidden=True)
        for prefix in ("train", "val", "grad", "amp", "perf", "mem", "time"):
            self._run.define_metric(f"{prefix}/*", step_metric="tokens")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._hand_over_often, name="wandb", daemon=True)
        self._thread.start()

    def _start(self, wandb, asked: str, fields: dict) -> None:
        """Starts W&B; when `auto` has chosen online and the server does not take the run, offline after all."""
        try:
            self._run = wandb.init(mode=self.mode, settings=_settings(wandb), **fields)
        except wandb.errors.CommError as error:
            if asked != "auto":
                raise
            self.mode, self.reason = "offline", f"W&B at {server()} does not take the run: {_line(error)}"
            wandb.teardown()  # its process still holds the id of the run that failed
            self._run = wandb.init(mode="offline", settings=_settings(wandb), **fields)

    def log(self, metrics: dict[str, float]) -> None:
        """Takes the metrics of a step or an evaluation; W&B has them at most HAND_OVER_S later."""
        if self._run is not None and self.problem is None:
            self._waiting.append(metrics | {"_timestamp": time.time()})  # of the step, not of handing it over

    def finish(self, status: str, summary: dict) -> None:
        """Closes the run with `summary` under result/ in its own summary; every status but ok makes it a failed one."""
        if self._run is None:
            return
        self._closing.set()
        self._thread.join()
        if self.problem is None:
            self._run.summary.update({f"result/{name}": value for name, value in summary.items() if value is not None})
            self._run.finish(exit_code=0 if status == "ok" else 1)
        self._run = None

    def _hand_over_often(self) -> None:
        try:
            while not self._closing.wait(HAND_OVER_S):
                self._hand_over()
            self._hand_over()
        except (OSError, RuntimeError) as error:
            # W&B's own process has died. Training does not depend on it; metrics.jsonl has everything.
            self.problem = f"W&B has stopped recording: {type(error).__name__}: {error}"

    def _hand_over(self) -> None:
        while self._waiting:
            self._run.log(self._waiting.popleft())


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _settings(wandb):
    """On disk soon, and no endless waiting for a server; the output of ranks is in the run's folder, not here."""
    wanted = {
        "console": "off",
        "init_timeout": float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_TIMEOUT_S)),
        "finish_timeout": FINISH_TIMEOUT_S,
        "x_transaction_log_flush_interval": FLUSH_S,
    }
    # Names with x_ are private to W&B and may go.
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in wandb.Settings.model_fields})
