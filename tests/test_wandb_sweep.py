"""W&B and sweeps: one run a point whatever happens to its ranks, in one group, with the end that result.json tells."""

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import tracked
from wandb_server import WandbServer

from parallel import launch
from tracking import result, wandb_close, wandb_file

POINTS = ("parallel=single", "parallel=tp2", "parallel=tp2 optimizer.lr=0.001")
GROUP = "2026-01-02_10-00-00-123456"


@pytest.fixture
def env(plain_env, tmp_path, monkeypatch):
    """This process and its ranks without W&B account; what is set here they see."""
    for name in set(os.environ) - set(plain_env):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return monkeypatch


@pytest.fixture
def server(env):
    """A W&B server for which there is no key yet."""
    with WandbServer() as server:
        yield server


@pytest.fixture
def sweep(tmp_path):
    """The folder of a sweep."""
    return tmp_path / GROUP


def log_in(env, server):
    """From now on runs are online."""
    for name, value in server.environment().items():
        env.setenv(name, value)


def run(run_dir, frozen, steps=5, end="", step_s=0.0):
    """Runs a point the way train.py does; the failure's status when it fails."""
    entry = tracked.command(run_dir, steps, step_s, end)
    try:
        launch.run(run_dir, frozen, entry)
    except launch.JobFailed as failure:
        return failure.status
    return "ok"


def wandb_sync(*folders):
    """Uploads with W&B's own command."""
    words = [tracked.WANDB, "sync", *map(str, folders)]
    done = subprocess.run(words, cwd=folders[0].parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def check_points(runs, sweep):
    """Every point of POINTS is there, once, in one group, with what it is."""
    assert sorted(runs) == [f"{GROUP}-{number}_point" for number in range(3)]
    single, tp2, slow = (runs[f"{GROUP}-{number}_point"] for number in range(3))
    assert [run["group"] for run in runs.values()] == [GROUP] * 3
    assert [run["name"] for run in (single, tp2, slow)] == [
        "tiny-single-fp32-adamw-clip1.0",
        "tiny-tp2-fp32-adamw-clip1.0",
        "tiny-tp2-fp32-adamw-clip1.0-lr=0.001",
    ]
    assert "parallel=tp2" in tp2["tags"] and "optimizer.lr=0.001" in slow["tags"]
    assert [run["config"]["parallel"]["tp"] for run in (single, tp2, slow)] == [1, 2, 2]
    assert slow["config"]["optimizer"]["lr"] == 0.001 and slow["config"]["choices"]["parallel"] == "tp2"
    facts = tp2["config"]["facts"]
    assert facts["world_size"] == 2 and facts["parameters"] == 1234567 and facts["device"] == "Abacus 9"
    tokens = tp2["config"]["train"]["global_batch"] * tp2["config"]["train"]["seq_len"]
    assert facts["tokens_per_step"] == tokens and facts["versions"]["torch"] and facts["git_commit"]
    for number, run in enumerate((single, tp2, slow)):
        lines = tracked.lines(sweep / f"{number}_point")
        assert [row["tokens"] for row in run["history"].values()] == [line["tokens"] for line in lines]
        assert run["exit_code"] == 0 and run["summary"]["result/val_loss_best"] == 2.25 and run["alerts"] == []


def test_each_point_is_one_run_of_its_group_and_stays_it_when_started_again(env, server, sweep):
    """Row 10 of what people hit: all points in one run, one run a rank, a new run on resume."""
    log_in(env, server)
    points = tracked.sweep(sweep, *POINTS)
    for number, frozen in enumerate(points):
        run(sweep / f"{number}_point", frozen, steps=8, end="raise" if number == 1 else "")
    failed = server.runs[f"{GROUP}-1_point"]
    assert failed["exit_code"] == 1 and len(failed["history"]) == 9
    assert failed["alerts"] == ["tiny-tp2-fp32-adamw-clip1.0: failed: ValueError: injected"]
    run(sweep / "1_point", points[1], steps=5)
    check_points(server.runs, sweep)
    assert len(list((sweep / "wandb").glob("run-*"))) == 3


def test_a_sweep_without_key_can_be_sent_later(env, server, sweep):
    points = tracked.sweep(sweep, *POINTS)
    run(sweep / "1_point", points[1], steps=8, end="killed")
    with ThreadPoolExecutor() as together:
        list(together.map(run, (sweep / f"{number}_point" for number in range(3)), points))
    log_in(env, server)
    wandb_sync(*(sweep / "wandb").glob("offline-run-*"))
    check_points(server.runs, sweep)


def check_killed(found, sweep, status, cause):
    """A run that was killed is there, failed, with its last step and what result.json says."""
    assert found["exit_code"] == 1 and found["group"] == GROUP and found["config"]["parallel"]["tp"] == 2
    lines = tracked.lines(sweep / "0_point")
    assert [row["tokens"] for row in found["history"].values()] == [line["tokens"] for line in lines]
    assert found["summary"]["result/status"] == status == tracked.result(sweep / "0_point")["status"]
    assert found["summary"]["result/steps"] == 40 and found["summary"]["train/loss"] == lines[-1]["train/loss"]
    assert cause in found["summary"]["result/cause"] and [cause in alert for alert in found["alerts"]][-1]


@pytest.mark.parametrize("end, rank", [("killed_at_once", 0), ("peer_killed", 1)])
def test_a_killed_rank_leaves_a_failed_run_with_its_last_step(env, server, sweep, end, rank):
    log_in(env, server)
    (frozen,) = tracked.sweep(sweep, "parallel=tp2")
    status = run(sweep / "0_point", frozen, steps=40, end=end, step_s=0.04)
    (found,) = server.runs.values()
    check_killed(found, sweep, status, f"rank {rank}: killed by SIGKILL")


@pytest.mark.parametrize("end, rank", [("killed_at_once", 0), pytest.param("peer_killed", 1, marks=pytest.mark.slow)])
def test_so_it_does_offline_and_through_sync(env, server, sweep, end, rank):
    (frozen,) = tracked.sweep(sweep, "parallel=tp2")
    status = run(sweep / "0_point", frozen, steps=40, end=end, step_s=0.04)
    overview, rows = tracked.leet(sweep, dict(os.environ))
    assert (overview["state"], overview["exit_code"], len(rows)) == ("failed", 1, 41)
    log_in(env, server)
    wandb_sync(*(sweep / "wandb").glob("offline-run-*"))
    (found,) = server.runs.values()
    check_killed(found, sweep, status, f"rank {rank}: killed by SIGKILL")
    assert len(found["alerts"]) == 1


def test_a_loss_that_is_not_finite_alerts(env, server, sweep):
    log_in(env, server)
    (frozen,) = tracked.sweep(sweep, "parallel=single")
    run(sweep / "0_point", frozen, end="nan")
    (found,) = server.runs.values()
    (alert,) = found["alerts"]
    assert alert.startswith("tiny-single-fp32-adamw-clip1.0: nan: the loss is not finite since step")


# Left open


@pytest.fixture(scope="module")
def left_open(tmp_path_factory):
    """A sweep of one point, all of whose processes were killed."""
    folder = tmp_path_factory.mktemp("crashed") / GROUP
    tracked.sweep(folder, "parallel=single")
    unwanted = ("WANDB_", "RANK")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    words = tracked.command(folder / "0_point", 60, 0.0, "killed")
    subprocess.run(words, env=env | {"HOME": str(folder)}, stdout=subprocess.DEVNULL, timeout=60)
    return folder


@pytest.fixture
def killed(left_open, env, sweep):
    """The same with result.json as its launcher would have written it: its folder and its W&B file."""
    shutil.copytree(left_open, sweep, symlinks=True)
    run_dir = sweep / "0_point"
    result.complete(run_dir, "failed", "rank 0: killed")
    return run_dir, run_dir / result.load(run_dir, "wandb.json")["file"]


def test_a_crashed_offline_run_has_config_and_summary_and_can_be_sent(left_open, env, server, sweep):
    """Row 23 of what people hit. Nobody was left to close the run: the program that started the rank is gone too."""
    shutil.copytree(left_open, sweep, symlinks=True)
    log_in(env, server)
    wandb_sync(*(sweep / "wandb").glob("offline-run-*"))
    (found,) = server.runs.values()
    assert found["exit_code"] == 1 and len(found["history"]) == 61
    assert found["config"]["model"]["layers"] == 4 and found["summary"]["train/loss"] == 1 + 4 / 60


def test_a_file_cut_off_anywhere_is_closed_with_what_is_whole(killed):
    run_dir, file = killed
    content, records = file.read_bytes(), wandb_file.read(file)
    assert len(content) > 2 * wandb_file.BLOCK  # so that records go on in the next block
    wandb_file.write(file, records)
    assert file.read_bytes() == content
    whole = set()
    for length in (*range(60_000, 60_000 + 1500, 37), wandb_file.BLOCK - 3, wandb_file.BLOCK + 2, len(content) - 1):
        file.write_bytes(content[:length])
        found = wandb_file.read(file)
        assert found == records[: len(found)]
        whole.add(len(found))
    assert len(whole) > 3
    file.write_bytes(content[:60_000])
    assert wandb_close.close(run_dir) is None
    overview, rows = tracked.leet(run_dir.parent, dict(os.environ))
    assert overview["state"] == "failed" and overview["summary"]["result/cause"] == "rank 0: killed" and len(rows) > 20


@pytest.mark.parametrize("at", [3, 5000])
def test_a_file_that_is_not_understood_is_left_alone(killed, at):
    run_dir, file = killed
    content = bytearray(file.read_bytes())
    content[at] ^= 255
    file.write_bytes(content)
    sentence = wandb_close.close(run_dir)
    assert sentence.startswith("W&B is not told how the run ended: ") and str(file.name) in sentence
    assert file.read_bytes() == content


def test_a_server_that_is_gone_costs_a_sentence_with_the_command_for_later(killed, env):
    run_dir, file = killed
    about = json.loads((run_dir / "wandb.json").read_text())
    (run_dir / "wandb.json").write_text(json.dumps(about | {"mode": "online"}))
    env.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    env.setenv("WANDB_API_KEY", "0123456789" * 4)
    env.setattr(wandb_close, "SEND_TIMEOUT_S", 3)
    sentence = wandb_close.close(run_dir)
    assert "does not hear how the run ended" in sentence and str(file.parent.resolve()) in sentence
