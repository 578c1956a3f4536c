"""result.json: how a run ended and what it reached, in one small file that other programs compare.

    status            ok | nan | oom | timeout | failed | interrupted
    cause             one line for every status but ok
    steps, tokens     how far the run came
    loss_final, loss_best, val_loss_start, val_loss_final, val_loss_best          nats per token
    tokens_per_s, step_s, mfu, peak_tflops, peak_source                           first step excluded
    peak_gib, clip_fraction, skipped_steps, skipped_spikes, left_out, rollbacks, first_nonfinite_step
    grad_norms        quantiles of the gradient norm, and what each threshold would have clipped
    explanation       the cause's cause in plain words, where it is a known one
    advice            overrides to try, or what else to do; null where nothing is known
    world_size, parameters, device, versions, git_commit, config_hash, choices, overrides, run_command
    started, ended    UTC, ISO 8601
    parent            of a run that goes on from another's checkpoint: that W&B run's id, the checkpoint and its step
    data, rank_map    what was trained on; which rank did what
    sample, verdict   generated text; what the run's expectation says about its loss

What a run cannot know is null. The file appears complete or not at all.
"""

import contextlib
import importlib.metadata
import json
import math
import platform
import shutil
import subprocess
import tomllib
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from parallel import frozen
from tracking import whole
from tracking.history import FILE as HISTORY_FILE
from tracking.history import read
from tracking.metrics import finite

FILE = "result.json"
# What is known when a run starts; kept apart so that a run that was killed can be described.
FACTS_FILE = "facts.json"
# Why the ranks are being stopped, as whoever started them knows it; a rank knows a signal only.
STOPPING_FILE = "ranks/stopping.json"
# What was found about a loss or memory that went wrong.
DOCTOR = "doctor"
STATUSES = ("ok", "nan", "oom", "timeout", "failed", "interrupted")
ROOT = Path(__file__).resolve().parent.parent
# The choices that tell runs apart at a glance.
NAMED = ("model", "parallel", "precision", "optimizer", "clip")


class Summary:
    """What the metrics of a run come to; fed line by line, while the run goes on or from its metrics.jsonl."""

    def __init__(self):
        self.last: dict[str, float] = {}
        self.losses: dict[str, dict[str, float]] = {}
        self.first_nonfinite_step: int | None = None

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Takes one line of metrics."""
        self.last |= {"step": step} | metrics
        for name in ("train/loss", "val/loss"):
            if name not in metrics:
                continue
            value = metrics[name]
            seen = self.losses.setdefault(name, {"start": value, "best": None})
            seen["final"] = value
            if finite(value):
                seen["best"] = value if seen["best"] is None else min(seen["best"], value)
            elif self.first_nonfinite_step is None:
                self.first_nonfinite_step = step

    @property
    def diverged(self) -> bool:
        """Whether the last training or validation loss is not finite."""
        return any(not finite(seen["final"]) for seen in self.losses.values())

    def fields(self) -> dict[str, float | None]:
        """The fields of result.json that metrics decide."""
        train, val = self.losses.get("train/loss", {}), self.losses.get("val/loss", {})
        get = self.last.get
        return {
            "steps": get("step", 0),
            "tokens": get("tokens", 0),
            "loss_final": train.get("final"),
            "loss_best": train.get("best"),
            "val_loss_start": val.get("start"),
            "val_loss_final": val.get("final"),
            "val_loss_best": val.get("best"),
            "tokens_per_s": get("perf/tokens_per_s_avg"),
            "step_s": get("perf/step_s_avg"),
            "mfu": get("perf/mfu_avg"),
            "peak_gib": get("mem/peak_gib"),
            "clip_fraction": get("grad/clip_fraction"),
            "skipped_steps": get("amp/skipped_steps"),
            "skipped_spikes": get("grad/skipped_spikes"),
            "left_out": get("train/left_out"),
            "rollbacks": get("train/rollbacks"),
            "first_nonfinite_step": self.first_nonfinite_step,
        }


def named(choices: dict[str, str]) -> list[str]:
    """What a run is called by: ["tiny", "tp2", "bf16", "adamw", "clip 1.0"]."""
    found = [(group, choices[group]) for group in NAMED if choices.get(group)]
    return [f"clip {choice}" if group == "clip" else choice for group, choice in found]


def facts(point: frozen.Frozen, given: dict) -> dict:
    """What is known before the first step, for result.json: `given` (see tracking.tracker) and the run's identity."""
    peak = given.get("peak") or {}
    return {
        "world_size": point.world_size,
        "parameters": given.get("parameters"),
        "device": given.get("device"),
        "peak_tflops": peak.get("tflops"),
        "peak_source": peak.get("source"),
        "data": given.get("data"),
        "rank_map": given.get("rank_map"),
        "versions": versions() | given.get("versions", {}),
        "git_commit": git_commit(),
        "config_hash": point.config_hash,
        "choices": point.choices,
        "overrides": point.overrides,
        "run_command": given.get("run_command"),
        "parent": given.get("parent"),
        "started": now(),
    }


def data_in_words(data: dict) -> str:
    """data.batches.Corpus.facts as one line."""
    if "tokens" not in data:
        return data["source"]
    held_out = f"{data['val_tokens']:,} held out"
    return f"{data['source']}: {data['tokens']:,} tokens, {held_out} (fingerprint {data['fingerprint']})"


def write(run_dir: str | Path, name: str = FILE, **fields) -> None:
    """Writes a JSON file of the run folder so that it is complete or absent; NaN and infinity become strings."""
    content = json.dumps(plain(fields), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    whole.write(Path(run_dir) / name, content.encode())


def clear(run_dir: str | Path, history: bool = True) -> None:
    """Takes away what an earlier run left in the same folder, so that nothing of it is mistaken for this run's.

    Without `history` its metrics stay, for a run that goes on from a checkpoint in the folder.
    """
    for name in (FILE, FACTS_FILE, STOPPING_FILE, "report.html", *[HISTORY_FILE] * history):
        (Path(run_dir) / name).unlink(missing_ok=True)
    shutil.rmtree(Path(run_dir) / DOCTOR, ignore_errors=True)


def load(run_dir: str | Path, name: str = FILE) -> dict:
    """A JSON file of the run folder, empty when it is not there; raises ValueError when it is damaged."""
    path = Path(run_dir) / name
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def explained(known) -> dict[str, str | None]:
    """The fields of result.json for what parallel.explain knows, which may be nothing."""
    return {"explanation": known and known.sentence, "advice": known and known.advice}


def stopping(run_dir: str | Path, status: str, cause: str) -> None:
    """Tells the ranks, before they are sent a signal, why; a full disk must not keep them from being stopped."""
    with contextlib.suppress(OSError):
        write(run_dir, STOPPING_FILE, status=status, cause=cause)


def why_stopped(run_dir: str | Path) -> tuple[str, str] | None:
    """Status and cause that `stopping` told, None where it told nothing."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        why = load(run_dir, STOPPING_FILE)
        return why["status"], why["cause"]
    return None


def complete(run_dir: str | Path, status: str, cause: str, known=None) -> None:
    """Writes or corrects result.json after the ranks have ended, for whoever started them and knows why they did.

    The first cause wins over what the logging rank noticed (being stopped, a peer that was gone). What it noticed
    about itself stays: running out of memory, a loss that is not finite. `known` is what parallel.explain says.
    """
    run_dir = Path(run_dir)
    fields = load(run_dir)
    if fields.get("status") in ("oom", "nan") and status == "failed":
        return
    if not fields:
        summary = Summary()
        for line in read(run_dir):
            summary.add(int(line.pop("step")), line)
        # Without the file of facts no rank came as far as its first step, and the configuration is all there is.
        begun = load(run_dir, FACTS_FILE)
        if not begun and (run_dir / "resolved.yaml").exists():
            begun = facts(frozen.load(run_dir), {}) | {"started": None}
        fields = summary.fields() | begun
    ended = {"status": status, "cause": cause} | explained(known) | {"ended": now()}
    write(run_dir, **{"status": status, "cause": cause} | fields | ended)


def versions() -> dict[str, str | None]:
    """Versions of what computes, found without importing it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        own = tomllib.load(file)["project"]["version"]
    found = {"tripod": own, "python": platform.python_version()}
    for package in ("torch", "megatron-core", "hydra-core", "wandb", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_commit() -> str | None:
    """Commit of this checkout, with `-dirty` when tracked files differ from it; None outside a checkout."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def now() -> str:
    """The time, UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def plain(value):
    """`value` in the types that JSON has: enum members by value, NaN and infinity as strings, other things by str."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return str(value)
