"""Checkpoints on disk: whole whenever a run is killed, left behind when it is stopped, refused by name when damaged."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_writer
import pytest
import torch
from checkpointed import ENDLESS, REPO, SMALL, at, command, environment, runner, steps

from parallel import checkpoint_files, checkpoint_io, compose


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs("name", ...)` trains in a folder of that name, which the tests of this module share."""
    return runner(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def written(runs):
    """A run of four steps with a checkpoint after every second."""
    return runs("written", *ENDLESS, "parallel=single", "train.steps=4", "checkpoint.every=2")


@pytest.fixture
def damaged(written, tmp_path):
    """The checkpoints of step 2 and 4, for a test to damage."""
    for step in (2, 4):
        shutil.copytree(at(written, step), tmp_path / "checkpoints" / checkpoint_files.name_of(step))
    shutil.copy(written / "checkpoints" / "latest", tmp_path / "checkpoints")
    return at(tmp_path, 4)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "one bit in the middle": ("__0_0.distcp", lambda p: flip(p, p.stat().st_size // 2)),
    "last byte missing": ("__0_0.distcp", lambda p: os.truncate(p, p.stat().st_size - 1)),
    "emptied": ("__0_0.distcp", lambda p: os.truncate(p, 0)),
    "gone": ("__0_0.distcp", Path.unlink),
    "index bit": ("index.json", lambda p: flip(p, 1000)),
    "index gone": ("index.json", Path.unlink),
    "foreign configuration": ("resolved.yaml", lambda p: p.write_text("a: 1\n")),
    "about bit": ("checkpoint.json", lambda p: flip(p, p.read_bytes().index(b'"step": 4') + 8)),
    "about cut": ("checkpoint.json", lambda p: os.truncate(p, 100)),
    "about foreign": ("checkpoint.json", lambda p: p.write_text('{"iteration": 4}')),
    "about a list": ("checkpoint.json", lambda p: p.write_text("[]")),
    "about of another version": ("checkpoint.json", lambda p: p.write_text('{"format": "x", "sha256": ""}')),
    "about no text": ("checkpoint.json", lambda p: p.write_bytes(bytes(range(256)))),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_its_file_is_named(kind, damaged):
    assert checkpoint_files.damage(damaged, checkpoint_files.read_about(damaged)) is None
    name, harm = DAMAGE[kind]
    harm(damaged / name)
    try:
        said = checkpoint_files.damage(damaged, checkpoint_files.read_about(damaged))
    except checkpoint_files.BadCheckpoint as problem:
        said = str(problem)
    assert said and str(damaged / name) in said
    assert checkpoint_files.advice(damaged).endswith(f"checkpoint.resume={at(damaged.parent.parent, 2)}")


def test_a_run_refuses_a_damaged_checkpoint_and_offers_the_one_before(damaged, runs):
    file = damaged / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    words = [*ENDLESS, "parallel=single", "train.steps=6", f"checkpoint.resume={damaged.parent.parent}"]
    better = f"checkpoint.resume={at(damaged.parent.parent, 2)}"
    run = runs("refused", *words, refused=better)
    assert str(file) in json.loads((run / "result.json").read_text())["cause"]


@pytest.mark.parametrize(
    "words, said",
    [
        ("checkpoint.resume=/nowhere train.steps=6", "/nowhere does not exist"),
        ("checkpoint.resume=FOLDER/.. train.steps=6", "is no checkpoint"),
        ("checkpoint.resume=FOLDER train.steps=4", "take train.steps=5 or more"),
        ("checkpoint.resume=FOLDER train.steps=6 model.layers=8", "take model.layers=4"),
        ("checkpoint.resume=FOLDER train.steps=6 train.global_batch=16", "take train.global_batch=8"),
        ("checkpoint.resume=FOLDER train.steps=6 optimizer=momentum", "take optimizer.name=adamw"),
        ("checkpoint.every=0", "checkpoint.every=0 is out of range"),
        ("checkpoint.keep=0", "checkpoint.keep=0 is out of range"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_starts(words, said, written):
    words = words.replace("FOLDER", str(written)).split()
    with pytest.raises(compose.Refused) as refusal:
        compose.check(compose.compose([*SMALL, *words])[0])
    assert said in str(refusal.value)


class Bomb:
    """What a hostile file would hold: unpickled, it makes a folder."""

    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_nothing_in_a_checkpoint_is_executed(damaged, tmp_path):
    bomb = Bomb(tmp_path / "executed")
    (damaged / ".metadata").write_bytes(pickle.dumps(bomb))
    checkpoint_io.read(damaged)
    index = json.loads((damaged / "index.json").read_bytes())
    tensor = next(iter(index.values()))
    torch.save(bomb, damaged / "bomb.distcp")
    tensor["boxes"][0][2:] = ["bomb.distcp", 0, (damaged / "bomb.distcp").stat().st_size]
    (damaged / "index.json").write_text(json.dumps(index))
    with pytest.raises(checkpoint_files.BadCheckpoint):
        checkpoint_io.read(damaged)
    assert not bomb.place.exists()
    tensor["boxes"][0][2] = "../../secret"
    (damaged / "index.json").write_text(json.dumps(index))
    with pytest.raises(checkpoint_files.BadCheckpoint, match="not a file of the checkpoint"):
        checkpoint_io.read(damaged)


def test_the_newest_checkpoints_are_kept_and_no_others(tmp_path):
    for step in (1, 2, 3, 10, 10):
        checkpoint_writer.commit(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000003", "step_00000010"]
    assert checkpoint_files.latest(tmp_path).name == "step_00000010"
    (tmp_path / "latest").write_bytes(b"\xff nonsense")
    assert checkpoint_files.latest(tmp_path).name == "step_00000010"


def whole(folder: Path) -> int:
    """The step of the newest checkpoint of a `checkpoints` folder, which must be undamaged; 0 when there is none."""
    found = checkpoint_files.latest(folder)
    if found is None:
        return 0
    about = checkpoint_files.read_about(found)
    assert checkpoint_files.damage(found, about) is None
    return about["step"]


def test_a_kill_between_pointer_and_rename_does_not_stand_in_the_way(tmp_path):
    (tmp_path / f"{checkpoint_files.UNFINISHED}{checkpoint_files.POINTER}.txt").write_text("step_00000001")
    assert checkpoint_files.begin(tmp_path, 2).is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [f"{checkpoint_files.UNFINISHED}step_00000002"]


def test_fifty_kills_of_a_process_that_does_nothing_but_write_checkpoints(tmp_path):
    random.seed(1)
    step = 0
    for _ in range(50):
        words = [sys.executable, str(REPO / "tests" / "checkpoint_writer.py"), str(tmp_path), str(step + 1)]
        writer = subprocess.Popen(words, env=environment() | {"PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE)
        writer.stdout.read(1)  # it has begun
        time.sleep(random.random() * 0.1)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        assert whole(tmp_path) >= step, "a checkpoint was lost"
        step = whole(tmp_path)
    assert step > 50, "it was killed before it had written anything"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 12])
def test_a_run_that_is_killed_again_and_again_goes_on_from_its_last_checkpoint(kills, tmp_path):
    random.seed(kills)
    run, step = tmp_path / "run", 0
    words = command(run, "parallel=single", "train.steps=100000", "checkpoint.every=1", "checkpoint.resume=auto")
    for _ in range(kills):
        training = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait(lambda: newest(run) > step, 120)  # noqa: B023 (called at once)
        time.sleep(random.random())
        training.kill()
        training.wait()
        time.sleep(0.5)  # its rank dies with it
        before, step = step, whole(run / "checkpoints")
        assert step > before
        assert list(steps(run))[: step + 1] == list(range(1, len(steps(run)) + 1))[: step + 1]
        # At most the step in progress when the kill came is not in the checkpoint.
        assert max(steps(run)) - step <= 1


def newest(run: Path) -> int:
    found = checkpoint_files.latest(run / "checkpoints")
    return int(found.name[5:]) if found else 0


@pytest.mark.parametrize(
    "how", ["SIGTERM", *(pytest.param(how, marks=pytest.mark.slow) for how in ("SIGINT", "timeout"))]
)
def test_a_run_that_is_stopped_writes_a_last_checkpoint_and_goes_on_from_it(how, runs, tmp_path):
    run = tmp_path / "run"
    words = ["parallel=dp2", "checkpoint.every=100000", *ENDLESS]
    limit = ["train.timeout_s=25"] if how == "timeout" else []
    started = command(run, *words, *limit, "train.steps=1000000")
    training = subprocess.Popen(started, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) > 3, 120)
    if how != "timeout":
        training.send_signal(getattr(signal, how))
    assert training.wait(120) != 0
    status = json.loads((run / "result.json").read_text())["status"]
    assert status == ("timeout" if how == "timeout" else "interrupted")
    done = whole(run / "checkpoints")
    assert done == max(steps(run)) > 3
    again = subprocess.run(
        command(run, *words, f"train.steps={done + 2}", "checkpoint.resume=auto"),
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert list(steps(run)) == list(range(1, done + 3)), "metrics of the first part stay, none is doubled"
    assert f"after step {done:,} of" in again.stdout
    assert json.loads((run / "result.json").read_text())["val_loss_start"] is not None


def wait(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
