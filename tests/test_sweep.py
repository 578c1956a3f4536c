"""Sweeps: every point checked before the first, accounted for at the end, and run once, over one command or several."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from conf.schema import Config
from parallel import assemble, compose, overrides
from parallel.frozen import config_hash

PARENT = Path(__file__).with_name("sweep_parent.py")


@pytest.fixture
def sweep(tmp_path: Path, plain_env: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`sweep("clip=0.1,1.0")` is train.py with -m, with a stand-in for ranks, in a folder of the test's own."""

    def run(*words: str, multirun: bool = True, env: dict | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PARENT), *(["-m"] if multirun else []), *words]
        env = plain_env | (env or {})
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    return run


def started(tmp_path: Path) -> list[str]:
    """The points started since the last question, as "0_tiny_..." names."""
    file = tmp_path / "started"
    names = [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return names


def numbers(tmp_path: Path) -> list[int]:
    """The numbers of the points started since the last question."""
    return [int(name.partition("_")[0]) for name in started(tmp_path)]


def folders(tmp_path: Path) -> list[Path]:
    """The sweeps there are, oldest first."""
    return sorted(file.parent for file in (tmp_path / "runs" / "sweeps").glob("*/sweep.json"))


def statuses(folder: Path) -> list[str]:
    """How the points of a sweep ended, in order of their numbers; missing where nothing tells."""
    points = json.loads((folder / "sweep.json").read_text())["points"]
    files = [folder / point["folder"] / "result.json" for point in points]
    return [json.loads(file.read_text())["status"] if file.exists() else "missing" for file in files]


def test_points_of_different_world_sizes_run_one_after_another_in_folders_of_their_own(sweep, tmp_path):
    done = sweep("parallel=single,tp2", "clip=0.1,1.0")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in (tmp_path / "started").read_text().splitlines()] == [
        ["0_tiny_single_fp32_adamw_clip-0.1", "1"],
        ["1_tiny_single_fp32_adamw_clip-1.0", "1"],
        ["2_tiny_tp2_fp32_adamw_clip-0.1", "2"],
        ["3_tiny_tp2_fp32_adamw_clip-1.0", "2"],
    ]
    (folder,) = folders(tmp_path)
    assert all((folder / name / ".hydra").is_dir() for name in started(tmp_path))
    assert "4 points: 4 ok" in done.stdout and (folder / "compare.html").exists()


def test_whatever_a_point_ends_with_is_recorded_and_the_next_runs(sweep, tmp_path):
    done = sweep("optimizer.lr=0.5,0.6,0.7,0.8,0.9,0.1")
    assert done.returncode == 1
    (folder,) = folders(tmp_path)
    assert statuses(folder) == ["nan", "oom", "failed", "timeout", "failed", "ok"]
    table = done.stdout[done.stdout.index("cause\n") :]
    assert all(cause in table for cause in ("made nan", "made oom", "made failed", "made timeout", "no ranks today"))
    assert f"resume={folder.relative_to(tmp_path)}" in done.stdout


def test_sweep_json_says_what_will_run_before_anything_does(sweep, tmp_path):
    sweep("parallel=single,tp2", "train.seed=3,4")
    (folder,) = folders(tmp_path)
    found = json.loads((folder / "sweep.json").read_text())
    assert found["id"] == folder.name and found["command"] == ["-m", "parallel=single,tp2", "train.seed=3,4"]
    assert [point["differs"] for point in found["points"]] == [
        {"parallel": layout, "train.seed": seed} for layout in ("single", "tp2") for seed in ("3", "4")
    ]
    assert len({point["config_hash"] for point in found["points"]}) == 4


def test_every_problem_of_every_point_is_told_and_nothing_starts(sweep, tmp_path):
    done = sweep("parallel=single,tp2", "model.heads=3,4", "train.micro_batch=2,3")
    assert done.returncode == 2 and not started(tmp_path) and not (tmp_path / "runs").exists()
    lines = done.stderr.splitlines()
    assert {line.split()[1] for line in lines if line.startswith("  - #")} == {"#0", "#1", "#3", "#4", "#5", "#7"}
    assert any("#5 parallel=tp2 model.heads=3 train.micro_batch=3: train.global_batch" in line for line in lines)


def test_illegal_points_are_left_out_and_listed_when_asked_for(sweep, tmp_path):
    words = "parallel=single,tp2", "train.micro_batch=2,3", "sweep.skip_illegal=true"
    done = sweep(*words)
    assert done.returncode == 0 and numbers(tmp_path) == [0, 2]
    assert "skipped #1" in done.stdout and "train.micro_batch=3" in done.stdout
    assert "2 ok, 2 skipped" in done.stdout
    again = sweep(*words, "resume=true")
    assert again.returncode == 0 and not started(tmp_path) and "2 ok, 2 skipped" in again.stdout
    assert sweep("train.micro_batch=3,5", "sweep.skip_illegal=true").returncode == 2


def test_a_sweep_is_continued_where_it_stopped(sweep, tmp_path):
    """Hydra itself starts all points again, in a new folder."""
    words = "optimizer.lr=0.1,0.6,0.7,0.2"
    sweep(words)
    assert numbers(tmp_path) == [0, 1, 2, 3]
    again = sweep(words, "resume=true")
    assert again.returncode == 1 and numbers(tmp_path) == [1, 2]
    assert "2 of 4 points are done already, 2 are left to run" in again.stdout
    sweep("resume=true", words, "retry=oom,timeout")
    assert numbers(tmp_path) == [1]
    (folder,) = folders(tmp_path)
    (folder / "0_tiny_dp_fp32_adamw_clip-1.0" / "result.json").unlink()
    sweep(f"resume={folder.relative_to(tmp_path)}", multirun=False)
    assert numbers(tmp_path) == [0, 1, 2], "a point without a result was killed"
    assert folders(tmp_path) == [folder] and len(list(folder.glob("*/resolved.yaml"))) == 4


def test_an_edited_configuration_is_a_new_point(sweep, tmp_path):
    own = tmp_path / "own" / "optimizer"
    own.mkdir(parents=True)
    shipped = (PARENT.parent.parent / "conf" / "optimizer" / "sgd.yaml").read_text()
    (own / "mine.yaml").write_text(shipped)
    words = "--config-dir", str(tmp_path / "own"), "optimizer=mine,adamw"
    sweep(*words)
    assert numbers(tmp_path) == [0, 1]
    (own / "mine.yaml").write_text(re.sub(r"^lr: .*", "lr: 0.03", shipped, flags=re.MULTILINE))
    done = sweep(*words, "resume=true")
    assert done.returncode == 0 and started(tmp_path) == ["2_tiny_dp_fp32_mine_clip-1.0"]
    (folder,) = folders(tmp_path)
    assert statuses(folder) == ["ok", "ok", "ok"], "what was reached before is still there"


def test_editing_the_configuration_leaves_a_sweep_that_runs_alone(tmp_path, plain_env):
    own = tmp_path / "own" / "optimizer"
    own.mkdir(parents=True)
    shipped = (PARENT.parent.parent / "conf" / "optimizer" / "sgd.yaml").read_text()
    (own / "mine.yaml").write_text(shipped)
    words = ["--config-dir", str(tmp_path / "own"), "-m", "optimizer=mine", "train.seed=1,5,7"]
    parent = subprocess.Popen([sys.executable, str(PARENT), *words], cwd=tmp_path, env=plain_env)
    wait_for_lines(tmp_path / "started", 2)
    (own / "mine.yaml").write_text("lr: nonsense")
    assert parent.wait(30) == 0
    (folder,) = folders(tmp_path)
    assert statuses(folder) == ["ok", "ok", "ok"]
    texts = [file.read_text() for file in sorted(folder.glob("*/.hydra/config.yaml"))]
    assert len(texts) == 3 and all("name: sgd" in text for text in texts)


def test_more_points_can_be_added_to_a_sweep(sweep, tmp_path):
    sweep("clip=0.1,1.0")
    (folder,) = folders(tmp_path)
    started(tmp_path)
    done = sweep("clip=none,0.1,1.0", f"resume={folder}")
    assert done.returncode == 0 and started(tmp_path) == ["2_tiny_dp_fp32_adamw_clip-none"]


def test_where_metrics_go_is_not_what_a_point_is(sweep, tmp_path):
    sweep("clip=0.1,1.0")
    (folder,) = folders(tmp_path)
    started(tmp_path)
    done = sweep(f"resume={folder}", "tracking.mode=disabled", multirun=False)
    assert done.returncode == 0 and not started(tmp_path)


def test_sweeps_kept_in_files_are_points_that_can_be_combined_with_words(sweep, tmp_path):
    """A product, and pairs that belong together."""
    assert sweep("+sweep=clip_thresholds", "precision=fp16").returncode == 0
    bounds = ["none", "1.0", "0.1", "0.01", "0.001", "adaptive", "per_layer", "by_value"]
    assert [name.rpartition("-")[2] for name in started(tmp_path)] == bounds
    assert sweep("+sweep=lr_x_optimizer", "clip=none,1.0").returncode == 0
    assert numbers(tmp_path) == list(range(60))
    points = json.loads((folders(tmp_path)[-1] / "sweep.json").read_text())["points"]
    assert points[-1]["differs"] == {"optimizer": "sgd", "optimizer.lr": "1.0", "clip": "1.0"}
    assert sweep("+sweep=clip_thresholds", multirun=False).returncode == 2
    again = sweep("+sweep=clip_thresholds", "clip=0.1", "precision=fp32", multirun=False)
    assert again.returncode == 0, "one point of it, run on its own"


@pytest.mark.parametrize("file", sorted((PARENT.parent.parent / "conf" / "sweep").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_sweep_file_says_what_it_is_for_and_composes(sweep, eight_gpus, tmp_path, file):
    assert file.read_text().splitlines()[1].startswith("# ") and "pick it" in file.read_text()
    done = sweep(f"+sweep={file.stem}", env=eight_gpus)
    assert done.returncode == 0 and len(numbers(tmp_path)) > 1, done.stderr


def test_points_put_together_from_parts_are_what_hydra_composes(tmp_path):
    words = [
        ["parallel=tp2", "clip='0.1'", "optimizer.lr=1e-2"],
        ["parallel=tp2", "clip=none", "train.tokens=40000", "train.steps=null"],
        ["experiment=llama2_13b_zero3", "optimizer=sgd", "parallel.dp=2"],
        ["experiment=llama2_13b_zero3", "parallel=single", "model=tiny"],
        ["optimizer=sgd", "precision=bf16", "+parallel.env.A=b", "train.timeout_s=10"],
        ["train.seq_len=${model.hidden}", "data=mock"],
        ["model=tiny", "precision.loss_scale=8", "precision=fp16", "schedule=wsd", "resume=true"],
    ]
    loader = Hydra.create_main_hydra2("train", create_config_search_path(str(overrides.CONF))).config_loader
    try:
        master = loader.load_configuration("config", [], RunMode.MULTIRUN)
        assembled = assemble.Assembler(loader, master)
        made_of_parts = 0
        for point in words + words[::-1]:
            cfg, choices = assembled(point)
            made_of_parts += isinstance(cfg, Config)
            full = loader.load_sweep_config(master, point)
            assert choices == compose.chosen(full.hydra)
            assert config_hash(compose.check(cfg, gpus=8)) == config_hash(compose.check(full, gpus=8)), point
        assert made_of_parts == 12
    finally:
        GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    ("words", "multirun", "said"),
    [
        (["resume=true"], False, "add -m"),
        (["resume=nowhere"], False, "is not the folder of a sweep"),
        (["clip=0.1,1.0", "retry=failed"], True, "add resume=true"),
        (["clip=0.1,1.0", "resume=true", "retry=broken"], True, "broken is no status"),
    ],
)
def test_a_resume_that_means_nothing_is_refused(sweep, tmp_path, words, multirun, said):
    done = sweep(*words, multirun=multirun)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not started(tmp_path)


def test_a_new_sweep_is_not_mixed_into_the_folder_of_another(sweep, tmp_path):
    assert sweep("clip=0.1,1.0", "hydra.sweep.dir=here").returncode == 0
    started(tmp_path)
    done = sweep("clip=0.1,none", "hydra.sweep.dir=here")
    assert done.returncode == 2 and "holds a sweep already" in done.stderr and not started(tmp_path)
    assert sweep("clip=0.1,1.0", "hydra.sweep.dir=here", "resume=true").returncode == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_sweep_and_the_table_is_shown(sweep, tmp_path, plain_env, signum):
    words = ["optimizer.lr=0.1,0.25,0.2"]
    command = [sys.executable, str(PARENT), "-m", *words]
    parent = subprocess.Popen(command, cwd=tmp_path, env=plain_env, stdout=subprocess.PIPE, text=True)
    wait_for_lines(tmp_path / "started", 2)
    refused = sweep(*words, "resume=true")
    assert refused.returncode == 2 and "still running" in refused.stderr
    parent.send_signal(signum)
    printed, _ = parent.communicate(timeout=30)
    assert parent.returncode == (130 if signum == signal.SIGINT else 128 + signum)
    assert "3 points: 1 ok" in printed and "resume=" in printed
    assert numbers(tmp_path) == [0, 1]


def wait_for_lines(file: Path, count: int) -> None:
    """Until a file has this many lines."""
    until = time.monotonic() + 30
    while not file.exists() or len(file.read_text().splitlines()) < count:
        assert time.monotonic() < until, f"{file} stayed short"
        time.sleep(0.02)


def test_a_sweep_whose_parent_was_killed_can_be_continued(sweep, tmp_path, plain_env):
    command = [sys.executable, str(PARENT), "-m", "optimizer.lr=0.1,0.25,0.2"]
    parent = subprocess.Popen(command, cwd=tmp_path, env=plain_env, stdout=subprocess.DEVNULL)
    wait_for_lines(tmp_path / "started", 2)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    started(tmp_path)
    (folder,) = folders(tmp_path)
    done = sweep(f"resume={folder}", "retry=missing", multirun=False)
    assert done.returncode == 1 and numbers(tmp_path) == [2]
    assert "2 ok, 1 interrupted" in done.stdout


def test_points_at_the_same_time_never_share_a_gpu(sweep, tmp_path, eight_gpus):
    done = sweep(
        "parallel=tp4_pp2,tp2,tp2_pp2,single",
        "clip=0.1,1.0",
        "train.seed=5",
        "launch.parallel_points=4",
        env=eight_gpus,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    used = [line.split() for line in (tmp_path / "devices").read_text().splitlines()]
    spans = [(set(gpus.split(",")), float(began), float(ended)) for gpus, began, ended in used]
    assert sorted(len(gpus) for gpus, *_ in spans) == [1, 1, 2, 2, 4, 4, 8, 8]
    together = 0
    for number, (gpus, began, ended) in enumerate(spans):
        for others, start, end in spans[:number]:
            if start < ended and began < end:
                together += 1
                assert not gpus & others
    assert together, "nothing ran at the same time"
    assert done.stdout.count(": started on GPU") == done.stdout.count(": ok after") == 8
    (folder,) = folders(tmp_path)
    assert all((point.parent / "console.log").exists() for point in folder.glob("*/result.json"))


def test_points_at_the_same_time_get_their_share_of_the_gpus_where_a_layout_takes_all_there_are(
    sweep, tmp_path, eight_gpus
):
    assert sweep("parallel=dp,single", "train.seed=3,4", "launch.parallel_points=2", env=eight_gpus).returncode == 0
    used = [line.split()[0] for line in (tmp_path / "devices").read_text().splitlines()]
    assert sorted(len(gpus.split(",")) for gpus in used) == [1, 1, 4, 4]


def test_a_failure_among_points_at_the_same_time_is_told_in_a_line(sweep, tmp_path):
    done = sweep("optimizer.lr=0.1,0.9,0.6", "launch.parallel_points=3")
    assert done.returncode == 1
    (folder,) = folders(tmp_path)
    assert statuses(folder) == ["ok", "failed", "oom"]
    assert "#1 optimizer.lr=0.9: failed after" in done.stdout and "ended with exit code 1" in done.stdout
    again = sweep("optimizer.lr=0.1,0.9,0.6", "launch.parallel_points=1", "resume=true")
    assert sorted(numbers(tmp_path)) == [0, 1, 1, 2, 2] and again.returncode == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_point_outlives_its_sweep(tmp_path, plain_env, signum):
    command = [sys.executable, str(PARENT), "-m", "optimizer.lr=0.25", "train.seed=1,2,3", "launch.parallel_points=2"]
    parent = subprocess.Popen(command, cwd=tmp_path, env=plain_env, stdout=subprocess.PIPE, text=True)
    wait_for_lines(tmp_path / "started", 2)
    points = psutil.Process(parent.pid).children()
    assert len(points) == 2
    parent.send_signal(signum)
    printed, _ = parent.communicate(timeout=30)
    assert not psutil.wait_procs(points, timeout=10)[1]
    assert len(numbers(tmp_path)) == 2
    if signum != signal.SIGKILL:
        assert "3 points: " in printed and "1 missing" in printed


SEARCH = """
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

@dataclass
class Conf:
    _target_: str = "hydra_plugins.halving.Halving"

ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=Conf)

class Halving(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        lr = 1.2
        for number in range(4):
            (job,) = self.launcher.launch([[*arguments, f"optimizer.lr={lr}"]], number)
            try:
                print("outcome", job.return_value)
            except Exception as failure:
                print("no outcome:", failure)
            lr /= 2
"""


def test_a_sweeper_that_searches_learns_what_each_point_reached(sweep, tmp_path):
    """As Hydra's Optuna sweeper does, with a plugin of a few lines in its place."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "halving.py").write_text(SEARCH)
    words = "hydra/sweeper=halving", "optimized_metric=val/loss"
    done = sweep(*words, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stderr
    told = [line for line in done.stdout.splitlines() if "outcome" in line]
    assert told == ["outcome 1.2", "no outcome: #1 optimizer.lr=0.6 ended as oom.", "outcome 0.3", "outcome 0.15"]
    assert numbers(tmp_path) == [0, 1, 2, 3] and "4 points: 3 ok, 1 oom" in done.stdout
    (folder,) = folders(tmp_path)
    points = json.loads((folder / "sweep.json").read_text())["points"]
    assert points[3]["overrides"] == ["optimizer.lr=0.15"]


def test_hydras_ranges_and_choices_are_points(sweep, tmp_path):
    assert sweep("train.seed=range(3,5)", "optimizer.lr=choice(0.1,0.2)", "clip=glob(0*)").returncode == 0
    assert len(numbers(tmp_path)) == 2 * 2 * 3
    unknown = sweep("optimizer.lr=interval(0.1,0.2)")
    assert unknown.returncode == 2 and "does not support" in unknown.stderr


def test_an_illegal_combination_of_zero_and_layout_is_found_before_any_point_starts(sweep, tmp_path):
    """Elsewhere found only after launch, deep in a run."""
    done = sweep("parallel=pp2_zero3,single", "model.tie_embeddings=false,true")
    assert done.returncode == 2 and not started(tmp_path)
    assert "#1 parallel=pp2_zero3 model.tie_embeddings=True" in done.stderr and "#0" not in done.stderr


def test_every_point_gets_the_environment_of_its_own_layout(sweep, tmp_path, eight_gpus):
    """CUDA_DEVICE_MAX_CONNECTIONS must be 1 for tensor parallelism and must not be for ZeRO-3."""
    assert sweep("parallel=tp2,zero3,single", env=eight_gpus).returncode == 0
    told = {line.split()[0].split("_")[2]: line.split()[2] for line in (tmp_path / "started").read_text().splitlines()}
    assert told == {"tp2": "1", "zero3": "None", "single": "None"}
