"""Checkpoints on disk: whole whenever a run is killed, left behind when it is stopped, refused by name when damaged."""

import contextlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

import checkpoint_writer
import psutil
import pytest
import torch
from checkpointed import ENDLESS, REPO, SMALL, at, command, environment, newest, runner, steps, wait, whole

from parallel import checkpoint_files, checkpoint_io, compose


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs("name", ...)` trains in a folder of that name, which the tests of this module share."""
    return runner(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def damaged(trained, tmp_path):
    """The checkpoints of step 3 and 6, for a test to damage."""
    for step in (3, 6):
        shutil.copytree(at(trained, step), tmp_path / "checkpoints" / checkpoint_files.name_of(step))
    shutil.copy(trained / "checkpoints" / "latest", tmp_path / "checkpoints")
    return at(tmp_path, 6)


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
    "about bit": ("checkpoint.json", lambda p: flip(p, p.read_bytes().index(b'"step": 6') + 8)),
    "about cut": ("checkpoint.json", lambda p: os.truncate(p, 100)),
    "about foreign": ("checkpoint.json", lambda p: p.write_text('{"iteration": 6}')),
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
    assert checkpoint_files.advice(damaged).endswith(f"checkpoint.resume={at(damaged.parent.parent, 3)}")


def test_a_run_refuses_a_damaged_checkpoint_and_offers_the_one_before(damaged, runs):
    file = damaged / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    words = [*ENDLESS, "parallel=single", "train.steps=8", f"checkpoint.resume={damaged.parent.parent}"]
    better = f"checkpoint.resume={at(damaged.parent.parent, 3)}"
    run = runs("refused", *words, refused=better)
    assert str(file) in json.loads((run / "result.json").read_text())["cause"]


@pytest.mark.parametrize(
    "words, said",
    [
        ("checkpoint.resume=/nowhere train.steps=8", "/nowhere does not exist"),
        ("checkpoint.resume=FOLDER/.. train.steps=8", "is no checkpoint"),
        ("checkpoint.resume=FOLDER train.steps=6", "take train.steps=7 or more"),
        ("checkpoint.resume=FOLDER train.steps=8 model.layers=8", "take model.layers=4"),
        ("checkpoint.resume=FOLDER train.steps=8 train.global_batch=16", "take train.global_batch=8"),
        ("checkpoint.resume=FOLDER train.steps=8 optimizer=momentum", "take optimizer.name=adamw"),
        ("checkpoint.every=0", "checkpoint.every=0 is out of range"),
        ("checkpoint.keep=0", "checkpoint.keep=0 is out of range"),
        ("checkpoint.asynchronous=sometimes", "take auto, true or false"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_starts(words, said, trained):
    words = words.replace("FOLDER", str(trained)).split()
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


def test_fifty_kills_of_a_process_that_does_nothing_but_write_checkpoints(tmp_path):
    random.seed(1)
    step, program = 0, str(REPO / "tests" / "checkpoint_writer.py")
    for _ in range(50):
        words = [sys.executable, program, str(tmp_path / "checkpoints"), str(step + 1)]
        writer = subprocess.Popen(words, env=environment() | {"PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE)
        writer.stdout.read(1)  # it has begun
        time.sleep(random.random() * 0.1)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        assert whole(tmp_path) >= step, "a checkpoint was lost"
        step = whole(tmp_path)
    assert step > 0, "it was always killed before it had written anything"


@pytest.mark.slow
@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_bit_for_bit_like_one_that_never_was(tmp_path):
    killed_again_and_again(tmp_path, kills=6)


def killed_again_and_again(folder: Path, kills: int) -> None:
    """Kills all processes of a run at random moments while it writes checkpoints beside training, and lets it go on.

    `python tests/test_checkpoint_files.py 50` does it fifty times.
    """
    random.seed(kills)
    run, step = folder / "run", 0
    words = "parallel=dp2 precision=fp16 model.dropout=0.1 checkpoint.every=1 checkpoint.asynchronous=true".split()
    words += ENDLESS
    for kill in range(kills):
        started = command(run, *words, "train.steps=100000", "checkpoint.resume=auto")
        training = subprocess.Popen(started, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if kill % 5 == 4:  # while it starts, or reads its checkpoint
            time.sleep(8 * random.random())
        else:
            wait(lambda: newest(run) > step)  # noqa: B023 (called at once)
            time.sleep(random.random())
        writing = any((run / "checkpoints").glob(".writing_*"))
        family = [training.pid, *(child.pid for child in psutil.Process(training.pid).children(recursive=True))]
        for pid in random.sample(family, len(family)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        training.wait()
        wait(lambda: not any(map(psutil.pid_exists, family)))  # noqa: B023
        before, step, logged = step, whole(run), list(steps(run))
        assert step > before or kill % 5 == 4
        assert logged == list(range(1, len(logged) + 1)), "metrics without gap or double"
        # At most the checkpoint that was being written and the step beside it are lost.
        assert 0 <= len(logged) - step <= 2
        print(f"kill {kill + 1}: {'while one was written, ' if writing else ''}checkpoint {step}, step {len(logged)}")
    last = [*words, f"train.steps={step + 2}"]
    finished = runner(folder)("run", *last, "checkpoint.resume=auto")
    never = runner(folder)("never_killed", *last)
    assert steps(finished) == steps(never)
    ours, theirs = checkpoint_io.read(at(finished, step + 2)), checkpoint_io.read(at(never, step + 2))
    assert set(ours) == set(theirs) and not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    print(f"after {step + 2} steps all {len(theirs)} tensors have the bits of a run that was never killed")


@pytest.mark.parametrize("how", ["SIGTERM", *(pytest.param(h, marks=pytest.mark.slow) for h in ("SIGINT", "timeout"))])
def test_a_run_that_is_stopped_writes_a_last_checkpoint_and_goes_on_from_it(how, tmp_path):
    run = tmp_path / "run"
    # A checkpoint is being written whenever the signal comes.
    words = ["parallel=dp2", "checkpoint.every=1", *ENDLESS]
    limit = ["train.timeout_s=25"] if how == "timeout" else []
    started = command(run, *words, *limit, "train.steps=1000000")
    training = subprocess.Popen(started, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) > 3)
    if how != "timeout":
        training.send_signal(getattr(signal, how))
    said = training.communicate(timeout=120)[0]
    result = json.loads((run / "result.json").read_text())
    assert training.returncode != 0 and result["status"] == ("timeout" if how == "timeout" else "interrupted")
    # The console, the page and result.json name the same cause.
    assert result["cause"].startswith("not finished after" if how == "timeout" else f"stopped by {how}")
    assert f"{result['status']} after" in said and result["cause"] in " ".join(said.split())
    assert escape(result["cause"]) in (run / "report.html").read_text()
    done = whole(run)
    assert done == max(steps(run)) > 3
    again = subprocess.run(
        command(run, *words, f"train.steps={done + 2}", "checkpoint.resume=auto"),
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert list(steps(run)) == list(range(1, done + 3)), "metrics of the first part stay, none is doubled"
    assert f"after step {done:,} of" in again.stdout
    assert json.loads((run / "result.json").read_text())["val_loss_start"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_disk_that_does_not_take_a_checkpoint_fails_the_run_in_a_sentence(asynchronous, tmp_path):
    run = tmp_path / "run"
    words = ["parallel=dp2", "train.steps=100000", "checkpoint.every=3", f"checkpoint.asynchronous={asynchronous}"]
    limit = (600_000, 600_000)  # bytes a file may have: more than a log, less than a rank's part of a checkpoint
    done = subprocess.run(
        command(run, *words), env=environment(), capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )  # fmt: skip
    result = json.loads((run / "result.json").read_text())
    assert done.returncode == 1 and result["status"] == "failed" and "Traceback" not in done.stderr
    assert "No checkpoint was written:" in result["cause"] and "File too large" in result["cause"]
    assert 3 <= max(steps(run)) < 1000, "not only at the end"
    assert not list((run / "checkpoints").iterdir())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        killed_again_and_again(Path(folder), int(sys.argv[1]))
