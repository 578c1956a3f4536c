"""W&B: one run for all ranks, readable whatever ends the process; over HTTP; and never a question."""

import json
import os
import signal
import subprocess
import time

import psutil
import pytest
import tracked
from wandb_server import WandbServer

from parallel import compose, rules
from tracking import mode
from tracking.wandb_run import identity

DEAD = "http://127.0.0.1:9"
KEY = "0123456789" * 4


@pytest.fixture
def env(plain_env, tmp_path):
    """No W&B account, wherever one might be."""
    return plain_env | {"HOME": str(tmp_path)}


@pytest.fixture
def run_dir(tmp_path):
    """A run folder with a frozen point."""
    tracked.point(tmp_path / "run", "clip=0.1")
    return tmp_path / "run"


# Which mode


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A process without W&B account; returns its home folder."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_auto_is_offline_without_a_key_and_online_with_one(nowhere, monkeypatch):
    assert mode.decide("auto") == ("offline", "no API key; `wandb login` gives one")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert mode.decide("auto") == ("online", "API key in WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert mode.decide("auto") == ("offline", "WANDB_MODE=offline")
    assert mode.decide("online") == ("online", "tracking.mode=online")


def test_a_key_counts_for_the_server_it_belongs_to(nowhere, monkeypatch):
    (nowhere / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    assert mode.decide("auto")[0] == "online"
    (nowhere / ".config" / "wandb").mkdir(parents=True)
    (nowhere / ".config" / "wandb" / "settings").write_text("[default]\nbase_url = https://wandb.example\n")
    assert mode.decide("auto")[0] == "offline"
    (nowhere / ".netrc").write_text(f"machine wandb.example\n  login user\n  password {KEY}\n")
    assert mode.decide("auto") == ("online", f"API key in {nowhere / '.netrc'}")
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.wandb.ai")
    assert mode.decide("auto")[0] == "offline"


def test_our_idea_of_where_the_key_is_agrees_with_wandb(nowhere):
    """So that an upgrade of W&B that moves its server or its files is noticed."""
    code = "import wandb; s = wandb.setup().settings; print(s.base_url); print(s.settings_system)"
    env = {name: value for name, value in os.environ.items()} | {"WANDB_SILENT": "true"}
    done = subprocess.run([tracked.sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [mode.server(), str(nowhere / ".config" / "wandb" / "settings")]


def test_online_without_a_key_is_refused_in_a_sentence(nowhere):
    with pytest.raises(mode.TrackingError, match="needs an API key for .*run `wandb login`"):
        mode.decide("online")
    cfg, *_ = compose.compose(["tracking.mode=online"])
    assert [sentence for sentence in rules.problems(cfg, gpus=0) if "API key" in sentence], "before a rank starts"


def test_a_damaged_netrc_is_no_key(nowhere):
    (nowhere / ".netrc").write_text("machine\n\n{{{")
    assert mode.decide("auto")[0] == "offline"


# Names


def test_points_of_a_sweep_share_a_group_and_a_folder(tmp_path):
    choices = {"model": "tiny", "parallel": "tp2", "precision": "bf16", "clip": "0.1", "launch": "local"}
    sweep = tmp_path / "2026-01-02_10-00-00-123456"
    tracked.sweep(sweep, "parallel=tp2", "parallel=tp2 optimizer.lr=0.01")
    first, second = (identity(sweep / f"{number}_point", choices) for number in range(2))
    assert first["group"] == second["group"] == sweep.name and first["dir"] == second["dir"] == str(sweep)
    assert (first["id"], second["id"]) == (f"{sweep.name}-0_point", f"{sweep.name}-1_point")
    assert (first["name"], second["name"]) == ("tiny-tp2-bf16-clip0.1", "tiny-tp2-bf16-clip0.1-lr=0.01")
    assert first["tags"] == ["model=tiny", "parallel=tp2", "precision=bf16", "clip=0.1"]
    assert second["tags"] == [*first["tags"], "optimizer.lr=0.01"]


def test_hydras_other_launchers_make_sweeps_too(tmp_path):
    hydra = tmp_path / "sweep" / "0" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "hydra.yaml").write_text("hydra:\n  mode: MULTIRUN\n")
    point = identity(hydra.parent, {})
    assert point["group"] == "sweep" and point["dir"] == str(tmp_path / "sweep")


def test_any_folder_gives_an_id_that_wandb_takes(tmp_path):
    single = identity(tmp_path / ("a b:#%?é" * 20) / ("c" * 90), {})
    assert len(single["id"]) <= 128 and single["id"].isascii() and not set(single["id"]) & set("/\\#?%: ")
    assert single["group"] is None and single["name"] == "c" * 90


def test_a_folder_that_a_person_named_gives_another_id_next_time_and_the_same_after_a_restart(tmp_path):
    """W&B would put the new run in the place of the old one, which may be a colleague's."""
    ids = []
    for started in ("2026-01-02T10:00:00+00:00", "2026-01-03T10:00:00+00:00"):
        tracked.sweep(tmp_path / "mine", "parallel=single")
        about = json.loads((tmp_path / "mine" / "sweep.json").read_text())
        (tmp_path / "mine" / "sweep.json").write_text(json.dumps(about | {"started": started}))
        ids += [identity(tmp_path / "mine" / "0_point", {})["id"] for _ in range(2)]
    assert ids[0] == ids[1] != ids[2] == ids[3] and all(word.startswith("mine-0_point-") for word in ids)


# Offline


def test_an_offline_run_is_complete_and_readable(run_dir, env):
    done = tracked.run(run_dir, env, steps=10)
    assert "offline (no API key; `wandb login` gives one)" in done.stdout
    overview, rows = tracked.leet(run_dir, env)
    assert (overview["state"], overview["exit_code"], overview["project"]) == ("finished", 0, "tripod")
    assert overview["name"] == "tiny-single-fp32-adamw-clip0.1" and "clip=0.1" in overview["tags"]
    assert overview["config"]["clip"].items() >= {"kind": "fixed", "max_norm": 0.1}.items()
    assert overview["config"]["choices"]["clip"] == "0.1" and overview["config"]["precision"]["compute"] == "fp32"
    assert overview["config"]["facts"]["parameters"] == 1234567
    assert overview["summary"]["result/status"] == "ok" and overview["summary"]["result/val_loss_best"] == 2.25
    recorded = [{name: row[name] for name in row if not name.startswith("_")} for row in rows]
    assert recorded == [{name: line[name] for name in line if name != "step"} for line in tracked.lines(run_dir)]
    _, axes = tracked.leet(run_dir, env, "metric")
    assert {axis["glob_name"].partition("/")[0] for axis in axes if axis.get("step_metric") == "tokens"} == {
        *(name.partition("/")[0] for row in recorded for name in row if "/" in name),
        "probe",  # declared, for runs that probe
    }
    folder = next((run_dir / "wandb").glob("offline-run-*")).relative_to(run_dir.parent)
    assert f"wandb leet {folder}" in done.stdout and f"wandb sync {folder}" in done.stdout


def test_a_failed_run_is_failed_and_complete(run_dir, env):
    tracked.run(run_dir, env, steps=10, end="raise")
    overview, rows = tracked.leet(run_dir, env)
    assert (overview["state"], overview["exit_code"], len(rows)) == ("failed", 1, 11)
    assert overview["summary"]["result/cause"] == "ValueError: injected"


def test_sigterm_loses_nothing(run_dir, env):
    process = subprocess.Popen(tracked.command(run_dir, 10**6, 0.002), env=env, stdout=subprocess.DEVNULL)
    tracked.wait_for_step(run_dir, 300)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    overview, rows = tracked.leet(run_dir, env)
    assert (overview["state"], overview["exit_code"]) == ("failed", 1)
    assert [row["tokens"] for row in rows] == [line["tokens"] for line in tracked.lines(run_dir)]
    # Rows are handed over many at a time, and still carry the time of their step.
    times = [row["_timestamp"] for row in rows]
    assert min(later - earlier for earlier, later in zip(times[:-1], times[1:], strict=True)) > 0.0015


def test_sigterm_loses_nothing_in_a_rank_that_cannot_react(run_dir, env):
    process = subprocess.Popen(tracked.command(run_dir, 20, 0.0, "stuck"), env=env, stdout=subprocess.DEVNULL)
    tracked.wait_for_step(run_dir, 20)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    overview, rows = tracked.leet(run_dir, env)
    assert (overview["state"], len(rows)) == ("failed", 21)
    assert tracked.result(run_dir)["status"] == "interrupted" and (run_dir / "report.html").exists()


def test_sigkill_loses_at_most_the_last_second(run_dir, env):
    process = subprocess.Popen(tracked.command(run_dir, 20, 0.0, "hang"), env=env, stdout=subprocess.DEVNULL)
    tracked.wait_for_step(run_dir, 20)
    time.sleep(1.0)
    process.kill()
    process.wait()
    overview, rows = tracked.leet(run_dir, env)
    assert overview["name"] == "tiny-single-fp32-adamw-clip0.1" and len(rows) == 21


def test_training_goes_on_when_wandb_dies(run_dir, env):
    process = subprocess.Popen(tracked.command(run_dir, 200, 0.02), env=env, stdout=subprocess.PIPE, text=True)
    tracked.wait_for_step(run_dir, 20)
    (core,) = [p for p in psutil.Process(process.pid).children(recursive=True) if "wandb-core" in p.name()]
    core.kill()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and tracked.result(run_dir)["steps"] == 200
    assert said.count("W&B has stopped recording") == 1
    overview, rows = tracked.leet(run_dir, env)
    assert (overview["state"], overview["exit_code"]) == ("finished", 0)
    assert [row["tokens"] for row in rows] == [line["tokens"] for line in tracked.lines(run_dir)]
    assert overview["summary"]["result/steps"] == 200 and overview["summary"]["val/loss"] == 2.25


def test_disabled_imports_and_leaves_nothing_of_wandb(run_dir, env):
    done = tracked.run(run_dir, env | {"WANDB_MODE": "disabled", "PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "tracking.wandb_run" in imported and "wandb" not in imported
    assert not (run_dir / "wandb").exists()


# Over HTTP


def test_an_online_run_arrives(run_dir, env):
    with WandbServer() as server:
        done = tracked.run(run_dir, env | server.environment(), steps=10)
    assert done.returncode == 0, done.stderr
    assert "online (API key in WANDB_API_KEY)" in done.stdout and f"{server.url}/me/tripod/runs/" in done.stdout
    (run,) = server.runs.values()
    assert (run["name"], run["exit_code"]) == ("tiny-single-fp32-adamw-clip0.1", 0)
    assert run["job_type"] == "train" and "parallel=single" in run["tags"]
    assert run["config"]["model"]["layers"] == 4 and run["summary"]["result/status"] == "ok"
    assert [row["tokens"] for row in run["history"].values()] == [line["tokens"] for line in tracked.lines(run_dir)]


def test_a_run_that_goes_on_from_its_checkpoint_stays_one_wandb_run_without_gap_or_double(run_dir, env):
    with WandbServer() as server:
        env = env | server.environment()
        process = subprocess.Popen(tracked.command(run_dir, 20, 0.0, "hang"), env=env, stdout=subprocess.DEVNULL)
        tracked.wait_for_step(run_dir, 20)
        time.sleep(1.0)
        process.kill()
        process.wait()
        first = json.loads((run_dir / "wandb.json").read_text())["id"]
        assert tracked.run(run_dir, env, steps=30, goes_on=[15]).returncode == 0  # five steps are done again
        steps = [0, *range(1, 31), 30]
        assert [line["step"] for line in tracked.lines(run_dir)] == steps
        ((run_id, run),) = server.runs.items()
        assert run_id == first and run["exit_code"] == 0
        assert [row["tokens"] for _, row in sorted(run["history"].items())] == [step * 8192 for step in steps]
        assert run["config"]["facts"]["parent"] is None
        # What the folder has lost the server may still have: it is not replaced by less.
        (run_dir / "metrics.jsonl").unlink()
        assert tracked.run(run_dir, env, steps=32, goes_on=[30]).returncode == 0
    assert set(server.runs) == {first, f"{first}-after-30"}
    assert len(server.runs[first]["history"]) == len(steps)


def test_a_run_that_goes_on_in_another_folder_is_another_wandb_run_that_names_its_parent(tmp_path, env):
    tracked.point(tmp_path / "child")
    with WandbServer() as server:
        env = env | server.environment()
        assert tracked.run(tmp_path / "child", env, steps=20, goes_on=[15, "the-parent"]).returncode == 0
    ((run_id, run),) = server.runs.items()
    parent = {"run": "the-parent", "checkpoint": "/runs/step_15", "step": 15}
    assert run_id != "the-parent" and run["config"]["facts"]["parent"] == parent
    assert tracked.result(tmp_path / "child")["parent"] == parent
    assert [line["step"] for line in tracked.lines(tmp_path / "child")] == [*range(16, 21), 20]


def test_auto_goes_offline_when_the_server_is_not_there(run_dir, env):
    dead = {"WANDB_BASE_URL": DEAD, "WANDB_API_KEY": KEY, "WANDB_INIT_TIMEOUT": "2"}
    done = tracked.run(run_dir, env | dead)
    assert done.returncode == 0 and f"offline (W&B at {DEAD} does not take the run: " in done.stdout
    assert list((run_dir / "wandb").glob("offline-run-*")) and tracked.result(run_dir)["status"] == "ok"


@pytest.mark.parametrize(
    "given, sentence",
    [
        (
            {"WANDB_BASE_URL": DEAD, "WANDB_API_KEY": KEY, "WANDB_INIT_TIMEOUT": "2"},
            "refused: W&B cannot start (Timed out",
        ),
        ({}, "refused: tracking.mode=online needs an API key"),
    ],
)
def test_online_stops_in_a_sentence_when_it_cannot_be(tmp_path, env, monkeypatch, given, sentence):
    monkeypatch.setenv("WANDB_API_KEY", KEY)  # which the ranks then do not have
    tracked.point(tmp_path / "run", "tracking.mode=online")
    done = tracked.run(tmp_path / "run", env | given)
    assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
