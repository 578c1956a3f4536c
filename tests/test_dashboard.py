"""python -m tracking.dashboard: a W&B workspace of a sweep, saved over HTTP."""

import json
import os
import subprocess
import sys

import pytest
import tracked
from wandb_server import WandbServer

from tracking import dashboard

GROUP = "2026-01-02_10-00-00-123456"
POINTS = ("parallel=single", "parallel=tp2", "parallel=single precision=bf16", "parallel=tp2 optimizer.lr=0.01")


@pytest.fixture
def env(plain_env, tmp_path, monkeypatch):
    """This process without W&B account, as its children are."""
    for name in set(os.environ) - set(plain_env):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return monkeypatch


@pytest.fixture
def sweep(tmp_path, env):
    """A sweep whose points have not been started."""
    tracked.sweep(tmp_path / GROUP, *POINTS)
    return tmp_path / GROUP


def call(sweep, *options):
    """The command as a person types it."""
    words = [sys.executable, "-m", "tracking.dashboard", str(sweep), *options]
    done = subprocess.run(words, cwd=tracked.PROGRAM.parent.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def spec_of(server):
    """The one workspace that the server has: its sections by name, and what it says about runs."""
    (view,) = server.views.values()
    assert view["displayName"] == f"Sweep {GROUP}"
    section = json.loads(view["spec"])["section"]
    return {part["name"]: part["panels"] for part in section["panelBankConfig"]["sections"]}, section["runSets"][0]


def test_a_workspace_has_the_curves_bars_and_differences_of_a_sweep(sweep, env):
    with WandbServer() as server:
        for name, value in server.environment().items():
            env.setenv(name, value)
        said = call(sweep)
        assert said.startswith(f"{server.url}/me/tripod?nw=") and said.split() == [
            json.loads((sweep / "dashboard.json").read_text())["url"]
        ]
        sections, runs = spec_of(server)
        assert list(sections) == [
            "Curves",
            "Throughput and memory",
            "By parallel",
            "By precision",
            "By optimizer.lr",
            "What differs",
        ]
        assert GROUP in json.dumps(runs["filters"]) and '"group"' in json.dumps(runs["filters"])
        lines = [panel["config"] for panels in sections.values() for panel in panels if "Line" in panel["viewType"]]
        assert {line["xAxis"] for line in lines} == {"tokens"}
        for section, key in (("By parallel", "choices.value.parallel"), ("By optimizer.lr", "optimizer.value.lr")):
            panels = sections[section]
            assert {panel["config"]["groupBy"] for panel in panels} == {key}
            shown = [metric for panel in panels for metric in panel["config"]["metrics"]]
            assert shown == ["train/loss", "grad/norm", "result/tokens_per_s", "result/peak_gib"]
        assert [panel["viewType"] for panel in sections["What differs"]] == [
            "Parallel Coordinates Plot",
            "Run Comparer",
        ]

        # Again: the same workspace, brought up to date. Removed on the server: a new one.
        tracked.point(sweep / "4_point", "clip=0.1")
        assert call(sweep) == said and "By clip" in spec_of(server)[0]
        server.views.clear()
        assert call(sweep) != said and len(server.views) == 1
        server.views.clear()
        assert "/team/other?nw=" in call(sweep, "--entity", "team", "--project", "other")
        assert server.unknown == []


def test_points_that_the_server_does_not_have_are_named_with_the_command_that_sends_them(sweep, env):
    tracked.run(sweep / "0_point", dict(os.environ), steps=3)
    with WandbServer() as server:
        for name, value in server.environment().items():
            env.setenv(name, value)
        *_, command = call(sweep).splitlines()
        words = command.split()
        assert words[:2] == ["wandb", "sync"] and len(words) == 3
        subprocess.run([tracked.WANDB, *words[1:]], cwd=sweep, capture_output=True, timeout=60, check=True)
        assert [run["group"] for run in server.runs.values()] == [GROUP]
    assert dashboard.unsent(sweep) == []


def test_what_keeps_a_workspace_from_being_made_is_said_in_a_sentence(sweep, env, tmp_path, capsys):
    def refused(folder):
        assert dashboard.main([str(folder)]) == 1
        return capsys.readouterr().err

    assert "no folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no runs" in refused(tmp_path / "empty")
    assert "run `wandb login`" in refused(sweep)
    env.setenv("WANDB_API_KEY", "0123456789" * 4)
    env.setitem(sys.modules, "wandb_workspaces", None)
    assert "pip install -e .[dashboard]" in refused(sweep)
    assert not (sweep / "dashboard.json").exists()


def test_a_server_that_refuses_is_named_with_its_answer(sweep, env):
    with WandbServer() as server:
        for name, value in server.environment().items():
            env.setenv(name, value)
        server.graphql = lambda *_: (_ for _ in ()).throw(LookupError("today"))
        words = [sys.executable, "-m", "tracking.dashboard", str(sweep)]
        done = subprocess.run(words, cwd=tracked.PROGRAM.parent.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"W&B at {server.url} does not take the workspace: " in done.stderr
    assert "Traceback" not in done.stderr
