"""Tracking: what is recorded of a run, and what is left of it whatever ends it."""

import os
import pty
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tracked
from tracked_run import FACTS, raw

from conf.schema import Config
from tracking import history, result
from tracking.metrics import METRICS, Meter
from tracking.tracker import Tracker, outcome_of

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture
def env(plain_env, tmp_path):
    """No W&B account, wherever one might be."""
    return plain_env | {"HOME": str(tmp_path), "WANDB_MODE": "disabled"}


def meter(steps: int = 100, peak: float | None = 2.0, clock=lambda: 0.0) -> Meter:
    cfg = Config()
    cfg.train.global_batch, cfg.train.seq_len, cfg.train.steps = 4, 250, steps
    return Meter(cfg, world_size=2, flops_per_token=1e9, peak_tflops=peak, clock=clock)


# Metrics


def test_every_metric_is_declared_and_every_declared_metric_appears():
    one = meter()
    bounded = {"clip_threshold": 1.0, "spike": False}
    first, second = one.step(raw(1, 1.0) | bounded), one.step(raw(2, 1.0) | bounded)
    assert set(second) == set(METRICS) - {"val/loss", "val/perplexity"}
    assert set(second) - set(first) == {name for name in METRICS if name.endswith("_avg")} | {"time/eta_s"}


def test_speeds_are_those_of_the_step_and_averages_leave_out_the_first():
    now = iter([10.0, 14.0, 16.0])
    one = meter(steps=10, clock=lambda: next(now))
    metrics = [one.step(raw(step, step_s)) for step, step_s in ((1, 100.0), (2, 2.0), (3, 0.5))][-1]
    assert metrics["perf/step_s"] == 0.5 and metrics["perf/step_s_avg"] == 1.25
    assert metrics["perf/tokens_per_s"] == 2000 and metrics["perf/tokens_per_s_avg"] == 800
    assert metrics["perf/tokens_per_s_per_device"] == 1000
    assert metrics["perf/tflops_per_device"] == 1.0 and metrics["perf/mfu"] == 0.5 and metrics["perf/mfu_avg"] == 0.2
    assert metrics["perf/data_wait_share"] == pytest.approx(0.01)
    # Two steps took 6 s of wall time, evaluations included; 7 are left.
    assert metrics["time/eta_s"] == pytest.approx(21)


def test_mfu_is_absent_where_the_peak_is_unknown():
    assert "perf/mfu" not in meter(peak=None).step(raw(1, 1.0))


def test_clip_fraction_counts_updates_only():
    one = meter()
    one.step(raw(1, 1.0) | {"clipped": False, "clip_coef": 1.0})
    one.step(raw(2, 1.0))
    metrics = one.step(raw(3, 1.0) | {"skipped": True, "clipped": True, "grad_norm": float("inf")})
    assert metrics["grad/clip_fraction"] == 0.5 and metrics["amp/skipped_steps"] == 1


# metrics.jsonl


def test_metrics_that_are_not_finite_stay_valid_json(tmp_path):
    written = history.History(tmp_path)
    written.add(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.5, "e": 3})
    assert tracked.lines(tmp_path) == [{"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5, "e": 3}]
    (read,) = history.read(tmp_path)
    assert read["a"] != read["a"] and read["b"] == float("inf") and read["c"] == -float("inf") and read["e"] == 3


def test_a_line_that_was_cut_off_is_left_out_and_a_damaged_one_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [line["step"] for line in history.read(tmp_path)] == [1, 2]
    file.write_text('{"step": 1}\n\0\0\0\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl: line 2 is damaged"):
        list(history.read(tmp_path))


def test_a_full_disk_costs_no_step_and_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    one = meter()
    try:
        with Tracker(tracked.point(tmp_path / "run"), tmp_path / "run", FACTS) as tracker:
            # The system refuses to let files grow, in the middle of a line: to a program this is what a full disk is.
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
            for step in range(1, 11):
                tracker.log(step, one.step(raw(step, 0.1)))
            assert (tmp_path / "run" / "metrics.jsonl").stat().st_size == 2000
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [line["step"] for line in tracked.lines(tmp_path / "run")] == list(range(1, 11))
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written: File too large; training goes on") == 1


def test_a_run_that_ends_on_a_full_disk_says_so_and_raises_nothing_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(ValueError, match="the first cause"):
            with Tracker(tracked.point(tmp_path / "run"), tmp_path / "run", FACTS) as tracker:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
                tracker.log(1, meter().step(raw(1, 0.1)))
                raise ValueError("the first cause")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().out
    assert "cannot be written to: File too large; result.json or report is missing" in said
    assert not (tmp_path / "run" / "result.json").exists()


# How a run ends


def test_a_finished_run(tmp_path, env):
    run_dir = tmp_path / "run"
    point = tracked.point(run_dir, "clip=0.1")
    done = tracked.run(run_dir, env, steps=10)
    assert done.returncode == 0, done.stderr
    found = tracked.result(run_dir)
    assert found["status"] == "ok" and found["cause"] is None
    assert (found["steps"], found["tokens"], found["world_size"], found["parameters"]) == (10, 81920, 1, 1234567)
    assert (found["loss_final"], found["loss_best"]) == (1.4, 1.4)
    assert (found["val_loss_start"], found["val_loss_final"], found["val_loss_best"]) == (5.5, 2.25, 2.25)
    assert found["clip_fraction"] == 1 and found["skipped_steps"] == 0 and found["step_s"] == pytest.approx(1e-3)
    assert found["peak_source"] == "dense BF16 peak of Abacus 9" and found["mfu"] > 0
    assert found["config_hash"] == point.config_hash and found["choices"]["clip"] == "0.1"
    assert found["overrides"] == point.overrides and found["run_command"] == "python train.py parallel=tp2"
    assert set(found["versions"]) >= {"tripod", "python", "torch", "megatron-core", "hydra-core", "wandb"}
    assert found["started"] <= found["ended"] and found["verdict"] and found["sample"]["prompt"] == "def "
    assert [line["step"] for line in tracked.lines(run_dir)] == [*range(11), 10]

    lines = done.stdout.strip().splitlines()
    assert lines[-1] == "run/report.html" and (tmp_path / lines[-1]).exists()
    block = done.stdout.partition("step 0/")[0]
    for word in (
        "1,234,567",
        "rank 1: tp 1",
        "Abacus 9",
        "dense BF16 peak",
        "a book",
        "disabled (WANDB_MODE=disabled)",
    ):
        assert word in block
    steps = [line for line in lines if line.startswith("step ") and "tokens/s" in line]
    assert [line.split()[1] for line in steps] == ["1/300", "5/300", "10/300"]
    assert "MFU" in steps[1] and "of 2 TFLOP/s dense BF16" in steps[1] and "left" in steps[1]
    assert done.stdout.count("python train.py") == 4


def test_a_failing_run_keeps_its_cause_and_every_step(tmp_path, env):
    tracked.point(tmp_path / "run")
    done = tracked.run(tmp_path / "run", env, steps=10, end="raise")
    assert done.returncode != 0 and "ValueError: injected" in done.stderr
    found = tracked.result(tmp_path / "run")
    assert (found["status"], found["cause"], found["steps"]) == ("failed", "ValueError: injected", 10)
    assert (tmp_path / "run" / "report.html").exists()


def test_a_loss_that_is_not_finite_makes_the_run_nan(tmp_path, env):
    tracked.point(tmp_path / "run")
    tracked.run(tmp_path / "run", env, steps=3, end="nan")
    found = tracked.result(tmp_path / "run")
    assert (found["status"], found["cause"]) == ("nan", "the loss is not finite since step 4")
    assert found["val_loss_final"] == "NaN" and found["val_loss_best"] == 5.5


def test_a_run_without_any_finite_loss_has_no_best_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with Tracker(tracked.point(tmp_path / "run"), tmp_path / "run", FACTS) as tracker:
        tracker.log(0, {"val/loss": float("nan")})
    found = tracked.result(tmp_path / "run")
    assert found["status"] == "nan" and found["val_loss_best"] is None and found["val_loss_final"] == "NaN"
    said = capsys.readouterr().out
    assert "nan at the start, nan at the end" in said and "at best" not in said and "try next" not in said


@pytest.mark.parametrize(
    "error, outcome",
    [
        (None, ("ok", None)),
        (KeyError(), ("failed", "KeyError")),
        (RuntimeError("CUDA out of memory. Tried"), ("oom", "RuntimeError: CUDA out of memory. Tried")),
        (MemoryError(), ("oom", "MemoryError")),
        (FloatingPointError("the loss is nan in step 3"), ("nan", "FloatingPointError: the loss is nan in step 3")),
        (KeyboardInterrupt(), ("interrupted", "KeyboardInterrupt")),
    ],
)
def test_what_an_exception_makes_of_a_run(error, outcome):
    assert outcome_of(error) == outcome


def test_sigterm_closes_the_run_as_interrupted(tmp_path, env):
    run_dir = tmp_path / "run"
    tracked.point(run_dir)
    process = subprocess.Popen(tracked.command(run_dir, 10**6, 0.001), cwd=tmp_path, env=env)
    tracked.wait_for_step(run_dir, 20)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    found, lines = tracked.result(run_dir), tracked.lines(run_dir)
    assert (found["status"], found["cause"]) == ("interrupted", "stopped by SIGTERM")
    assert [line["step"] for line in lines] == list(range(found["steps"] + 1)) and found["steps"] >= 20


def test_sigkill_leaves_every_finished_step_and_the_parent_completes_the_result(tmp_path, env):
    run_dir = tmp_path / "run"
    point = tracked.point(run_dir)
    process = subprocess.Popen(tracked.command(run_dir, 20, 0.0, "hang"), cwd=tmp_path, env=env)
    tracked.wait_for_step(run_dir, 20)
    process.kill()
    process.wait()
    assert [line["step"] for line in tracked.lines(run_dir)] == list(range(21))
    assert not (run_dir / "result.json").exists()
    result.complete(run_dir, "failed", "rank 0: killed by SIGKILL")
    found = tracked.result(run_dir)
    assert (found["status"], found["cause"]) == ("failed", "rank 0: killed by SIGKILL")
    assert found["steps"] == 20 and found["val_loss_start"] == 5.5 and found["tokens_per_s"] > 0
    assert found["config_hash"] == point.config_hash and found["device"] == "Abacus 9"


def test_a_run_that_never_began_still_gets_a_result(tmp_path):
    point = tracked.point(tmp_path / "run")
    result.complete(tmp_path / "run", "failed", "rank 1: ImportError: no")
    found = tracked.result(tmp_path / "run")
    assert found["status"] == "failed" and found["steps"] == 0 and found["config_hash"] == point.config_hash


@pytest.mark.parametrize(
    "noticed, told, kept",
    [("interrupted", "failed", "failed"), ("failed", "timeout", "timeout"), ("oom", "failed", "oom")],
)
def test_the_first_cause_wins_over_what_the_logging_rank_noticed(tmp_path, noticed, told, kept):
    result.write(tmp_path, status=noticed, cause="noticed", steps=7)
    result.complete(tmp_path, told, "told")
    assert tracked.result(tmp_path)["status"] == kept and tracked.result(tmp_path)["steps"] == 7
    assert tracked.result(tmp_path)["cause"] == ("noticed" if kept == noticed else "told")


def test_a_second_run_in_a_folder_shows_nothing_of_the_first(tmp_path, env, monkeypatch):
    run_dir = tmp_path / "run"
    point = tracked.point(run_dir)
    tracked.run(run_dir, env, steps=10)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with Tracker(point, run_dir, FACTS):
        assert not (run_dir / "result.json").exists() and not tracked.lines(run_dir)


def test_an_unwritable_folder_is_refused_in_a_sentence(tmp_path, env):
    tracked.point(tmp_path / "run")
    (tmp_path / "run" / "facts.tmp").mkdir()
    done = tracked.run(tmp_path / "run", env)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "cannot be written to: Is a directory; choose another with hydra.run.dir=..." in done.stderr


def test_on_a_terminal_a_bar_shows_progress(tmp_path, env):
    tracked.point(tmp_path / "run", "train.steps=40")
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        tracked.command(tmp_path / "run", 40, 0.03),
        cwd=tmp_path,
        env=env | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(controller, 65536)
        except OSError:  # how a terminal ends on Linux
            break
    assert process.wait(30) == 0
    shown = shown.decode()
    for part in ("━", "100%", "40/40", "tokens/s", "of 2 TFLOP/s dense BF16", "clipped 100%", "left", "val 5.5000"):
        assert part in shown
    assert shown.strip().splitlines()[-1].strip() == "run/report.html"


def test_a_sample_cannot_command_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with Tracker(tracked.point(tmp_path / "run"), tmp_path / "run", FACTS) as tracker:
        tracker.sample("def ", "\x1b[2J\x07 f():\n\treturn")
    assert "  | def \ufffd[2J\ufffd f():\n  | \treturn\n" in capsys.readouterr().out
    assert tracked.result(tmp_path / "run")["sample"]["text"] == "\x1b[2J\x07 f():\n\treturn"


def test_tracking_needs_neither_torch_nor_wandb_to_be_imported():
    code = "import sys, tracking.tracker, tracking.report; sys.exit(bool({'torch', 'wandb'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
