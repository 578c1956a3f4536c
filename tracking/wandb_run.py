"""One W&B run per training run, whose offline file is readable whatever ends the process.

W&B writes its file every 15 seconds by default and loses what came after when the process is killed; here it is every
half second. A thread hands steps over, because one call to W&B waits up to several milliseconds for another thread and
process. Together, a SIGKILL costs at most the last second; any other end costs nothing.
"""

import contextlib
import hashlib
import os
import re
import shutil
import threading
import time
from collections import deque
from pathlib import Path

from omegaconf import OmegaConf

from tracking.mode import TrackingError, decide, server
from tracking.result import NAMED, load, named, now, plain, write
from tracking.runs import SWEEP_FILE

# In a run's folder: id, group, project, display_name, mode, url, file (relative), and status and cause as W&B has them.
FILE = "wandb.json"
LONGEST_ID = 128  # W&B's limit

HAND_OVER_S = 0.5
FLUSH_S = 0.5
INIT_TIMEOUT_S = 20
FINISH_TIMEOUT_S = 60


def sweep_of(run_dir: Path) -> Path | None:
    """The sweep's folder, when `run_dir` is a point of a sweep."""
    for folder in list(run_dir.parents)[:3]:  # hydra.sweep.subdir may have slashes
        if (folder / SWEEP_FILE).exists():
            return folder
    file = run_dir / ".hydra" / "hydra.yaml"  # a sweep by another launcher than this project's
    if file.exists() and OmegaConf.load(file).hydra.mode == "MULTIRUN":
        return run_dir.parent
    return None


def identity(run_dir: Path, choices: dict[str, str], known_id: str | None = None) -> dict:
    """The fields by which W&B groups and finds runs: one W&B run a run folder, one group and folder of files a sweep.

    A point that is started again in its folder gets the same id. `known_id` is that of a run that goes on from its
    checkpoint, for a folder that has lost it.
    """
    run_dir = run_dir.absolute()
    sweep = sweep_of(run_dir)
    home = sweep or run_dir.parent
    about = load(sweep, SWEEP_FILE) if sweep else {}
    folder = str(run_dir.relative_to(home))
    differs = next((point["differs"] for point in about.get("points", []) if point["folder"] == folder), {})
    differs = {key: value for key, value in differs.items() if key not in NAMED}
    names = [name.replace(" ", "") for name in named(choices)]
    names += [f"{key.rpartition('.')[2]}={value}" for key, value in differs.items()]
    labels = {group: choices[group] for group in NAMED if choices.get(group)} | differs
    return {
        "id": load(run_dir, FILE).get("id") or known_id or _id(home.name, folder, about.get("started") or now()),
        "name": "-".join(names)[:128] or run_dir.name,
        "group": sweep.name if sweep else None,
        "job_type": "train",
        "tags": [f"{key}={value}"[:64] for key, value in labels.items()],
        "dir": str(home if sweep else run_dir),
    }


def _id(home: str, folder: str, began: str) -> str:
    """A legal id that no other run has, and the same one whenever it is asked for.

    The folders that this project names hold the time in microseconds. A name that a person gave may come again, from a
    colleague too, and W&B would put the new run in the place of the old one; the time of the start tells them apart.
    """
    name = f"{home}-{folder}"
    unique = re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)
    if unique != name or len(unique) > LONGEST_ID or not re.search(r"\d\d-\d\d-\d\d-\d{6}", unique):
        unique = unique[: LONGEST_ID - 9] + "-" + hashlib.sha256(f"{name} {began}".encode()).hexdigest()[:8]
    return unique


class WandbRun:
    """A W&B run. `mode` and `reason` say how it is used; `folder` is where its files are, None when disabled."""

    def __init__(self, frozen, run_dir: Path, facts: dict, known_id: str | None = None):
        """Starts the run. Raises TrackingError when W&B cannot be used in the way that was asked for.

        `known_id`: see `identity`.
        """
        asked = str(frozen.cfg.tracking.mode.value)
        self.mode, self.reason = decide(asked)
        self.folder: Path | None = None
        self.url: str | None = None
        self.problem: str | None = None
        self._run, self._run_dir, self._waiting = None, run_dir, deque()
        if self.mode == "disabled":
            (run_dir / FILE).unlink(missing_ok=True)
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
        config = {name: vars(group) for name, group in vars(frozen.cfg).items()}
        about = {"tokens_per_step": frozen.cfg.train.global_batch * frozen.cfg.train.seq_len} | facts
        about.pop("choices", None)
        try:
            fields = {"project": frozen.cfg.tracking.project, **identity(run_dir, frozen.choices, known_id)}
            if fields["id"] == (facts.get("parent") or {}).get("run"):
                # The folder has lost the metrics of its earlier steps, which W&B may still have.
                fields["id"] = f"{fields['id'][: LONGEST_ID - 20]}-after-{facts['parent']['step']}"
            config = plain(config | {"choices": frozen.choices, "facts": about})
            self._start(wandb, asked, fields | {"config": config})
            self.folder, self.url = Path(self._run.dir).parent, self._run.url if self.mode == "online" else None
            self._remember(fields)
        except (wandb.errors.Error, OSError, ValueError) as error:
            raise TrackingError(f"W&B cannot start ({_line(error)}); tracking.mode=disabled does without.") from error
        self._run.define_metric("tokens", hidden=True)
        for prefix in ("train", "val", "grad", "amp", "probe", "perf", "mem", "time"):
            self._run.define_metric(f"{prefix}/*", step_metric="tokens")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._hand_over_often, name="wandb", daemon=True)
        self._thread.start()

    def _start(self, wandb, asked: str, fields: dict) -> None:
        """Starts W&B, in the place of an earlier try of the same run.

        When `auto` has chosen online and the server does not take the run, offline after all.
        """
        _make_room(Path(fields["dir"]), fields["id"])
        try:
            self._run = wandb.init(mode=self.mode, settings=_settings(wandb), **fields)
        except wandb.errors.CommError as error:
            if asked != "auto":
                raise
            self.mode, self.reason = "offline", f"W&B at {server()} does not take the run: {_line(error)}"
            wandb.teardown()  # its process still holds the id of the run that failed
            _make_room(Path(fields["dir"]), fields["id"])
            self._run = wandb.init(mode="offline", settings=_settings(wandb), **fields)

    def _remember(self, fields: dict, status: str | None = None, cause: str | None = None) -> None:
        """Leaves in the run's folder what whoever started the ranks needs to close this run (tracking.wandb_close)."""
        about = {name: fields[name] for name in ("id", "group", "project")} | {"display_name": fields["name"]}
        file = os.path.relpath(self.folder / f"run-{fields['id']}.wandb", self._run_dir)
        write(self._run_dir, FILE, **about, mode=self.mode, url=self.url, file=file, status=status, cause=cause)
        self._fields = fields

    def log(self, metrics: dict[str, float], histograms: dict | None = None) -> None:
        """Takes the metrics of a step or an evaluation, and counts and edges of its histograms; W&B has them at most
        HAND_OVER_S later.
        """
        if self._run is not None and self.problem is None:
            if histograms:
                from wandb import Histogram

                metrics = metrics | {name: Histogram(np_histogram=held) for name, held in histograms.items()}
            self._waiting.append(metrics | {"_timestamp": time.time()})  # of the step, not of handing it over

    def finish(self, status: str, summary: dict) -> None:
        """Closes the run with `summary` under result/ in its own summary; every status but ok makes it a failed one."""
        if self._run is None:
            return
        self._closing.set()
        self._thread.join()
        if self.problem is None:
            self._run.summary.update(in_summary(summary))
            if status not in ("ok", "interrupted"):
                self._run.alert(**alert(self._fields["name"], status, summary["cause"]))
            self._run.finish(exit_code=0 if status == "ok" else 1)
            with contextlib.suppress(OSError):  # whoever started the ranks then closes the run once more
                self._remember(self._fields, status, summary["cause"])
        else:
            from tracking import wandb_close

            wandb_close.close(self._run_dir)
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


def in_summary(outcome: dict) -> dict:
    """The part of result.json that W&B shows beside its own last values."""
    return {f"result/{name}": value for name, value in outcome.items() if value is not None}


def alert(name: str, status: str, cause: str) -> dict[str, str]:
    """The message that W&B sends to who asked for messages, when a run did not end well."""
    return {"title": f"{name}: {status}", "text": cause, "level": "ERROR"}


def _make_room(folder: Path, run_id: str) -> None:
    """Removes W&B's files of an earlier try of the same run, as its metrics.jsonl was: it starts from the beginning."""
    for old in (folder / "wandb").glob("*run-*"):
        if re.fullmatch(r"(offline-)?run-\d+_\d+-" + re.escape(run_id), old.name) and not old.is_symlink():
            shutil.rmtree(old)


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
