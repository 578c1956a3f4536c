"""What a point asks SLURM for, and how a task of a step behaves; all of it without SLURM (make slurm-check has one)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel import slurm, srun, submit
from parallel.slurm import Allocation, NoAllocation, Placement
from parallel.slurm_task import MARK

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture
def submitted(cfg_of):
    """`submitted("parallel=tp2")` is a point as hydra/launcher=submitit_slurm would check it, on GPUs."""
    from parallel import compose

    def point(*overrides: str):
        cfg, *_ = compose.compose(
            ["launch=srun", "cluster=h100_x8", "model.layers=8", "model.heads=8", "model.kv_heads=8", *overrides]
        )
        return compose.check(cfg, gpus=submit.gpus(cfg))

    return point


@pytest.mark.parametrize(
    ("layout", "ranks", "asked"),
    [
        ("parallel.tp=1 parallel.pp=1 parallel.dp=1", 1, (1, 1)),
        ("parallel.tp=2 parallel.dp=2", 4, (1, 4)),
        ("parallel.tp=8 parallel.dp=1", 8, (1, 8)),
        ("parallel.tp=4 parallel.pp=4 parallel.dp=1", 16, (2, 8)),
        # Twelve ranks in groups of four: a group is not torn apart, so the second node has four.
        ("parallel.tp=4 parallel.dp=3 train.global_batch=12", 12, (2, 8)),
        ("parallel.tp=2 parallel.dp=6 train.global_batch=12", 12, (2, 6)),
        ("parallel.tp=1 parallel.dp=12 train.global_batch=24", 12, (2, 6)),
        # All that cluster.nodes has, where the point says nothing.
        ("parallel=dp train.global_batch=64", 8, (1, 8)),
        ("parallel=dp train.global_batch=64 cluster.nodes=4", 32, (4, 8)),
    ],
)
def test_a_job_asks_for_the_nodes_and_gpus_of_its_point(submitted, layout, ranks, asked):
    cfg = submitted(*layout.split())
    assert slurm.world_size(cfg) == ranks
    nodes, per_node = asked
    assert submit.resources(cfg) == {"nodes": nodes, "ntasks_per_node": per_node, "gpus_per_node": per_node}


def test_a_job_for_cpus_asks_for_no_gpu(submitted):
    cfg = submitted("launch.device=cpu", "cluster.devices_per_node=2", "parallel.tp=2", "parallel.dp=2")
    assert submit.resources(cfg) == {"nodes": 2, "ntasks_per_node": 2}


def test_a_point_has_the_same_identity_on_a_cluster_and_here(submitted):
    from parallel import compose
    from parallel.frozen import config_hash

    cfg, *_ = compose.compose(
        ["launch.device=cpu", "model.layers=8", "model.heads=8", "model.kv_heads=8", "parallel=tp2"]
    )
    assert config_hash(compose.check(cfg)) == config_hash(submitted("launch.device=cpu", "parallel=tp2"))


def test_ranks_are_laid_over_the_nodes_of_an_allocation(cfg_of):
    there = Allocation("1", ("a", "b", "c"), (4, 4, 4), 0)
    assert slurm.hosts(cfg_of("parallel=tp2"), there) == ["a", "a"]
    assert slurm.hosts(cfg_of("parallel.dp=6", "train.global_batch=12"), there) == ["a"] * 3 + ["b"] * 3
    # A tensor-parallel group stays on one node.
    crowd = cfg_of("parallel.tp=2", "parallel.dp=3", "train.global_batch=12")
    assert slurm.hosts(crowd, there) == ["a"] * 4 + ["b"] * 2
    # More ranks than CPUs share them, rather than being refused.
    small = Allocation("1", ("a", "b"), (1, 1), 0)
    assert slurm.hosts(cfg_of("parallel.dp=4"), small) == ["a", "a", "b", "b"]
    # A group larger than a node has to cross.
    wide = cfg_of("parallel.tp=4", "parallel.dp=1")
    assert slurm.place(wide, 2) == Placement(nodes=2, per_node=2)


@pytest.fixture
def allocation(tmp_path, monkeypatch):
    """`allocation(details, SLURM_...=...)` puts this process into an allocation of nodes a1 and a2."""

    def make(details: str, **variables: str) -> None:
        answer = f'#!/bin/sh\ncase "$*" in "show hostnames a[1-2]") echo a1; echo a2;; *) echo "{details}";; esac\n'
        for name, text in {"scontrol": answer, "srun": "#!/bin/sh\n"}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
        variables = {"SLURM_JOB_ID": tmp_path.name, "SLURM_JOB_NODELIST": "a[1-2]"} | variables
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.mark.parametrize(
    ("details", "gpus"),
    [
        ("Nodes=a[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:4(IDX:0-3)", 4),
        ("Nodes=a1 CPU_IDs=0 Mem=0 GRES=nic:1(IDX:0),gpu:h100:8(IDX:0-7) Nodes=a2 GRES=gpu:h100:2(IDX:0-1)", 2),
        ("Nodes=a[1-2] CPU_IDs=0-7 Mem=0 GRES=", 0),
    ],
)
def test_an_allocation_says_what_it_has(allocation, details, gpus):
    allocation(details, SLURM_JOB_CPUS_PER_NODE="16,8")
    there = slurm.allocation()
    assert (there.hosts, there.cpus, there.gpus) == (("a1", "a2"), (16, 8), gpus)


def test_srun_is_refused_in_a_sentence(allocation, train, monkeypatch):
    done = train("launch=srun", env={"SLURM_JOB_ID": ""})
    assert done.returncode == 2 and "run it under salloc" in done.stderr and "Traceback" not in done.stderr
    allocation("GRES=gpu:4(IDX:0-3)", SLURM_JOB_CPUS_PER_NODE="16(x2)")
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    with pytest.raises(NoAllocation, match="not on PATH"):
        slurm.allocation()


def test_a_layout_larger_than_the_allocation_is_refused_with_what_fits(allocation, plain_env, tmp_path):
    allocation("GRES=gpu:2(IDX:0-1)", SLURM_JOB_CPUS_PER_NODE="16(x2)")
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, str(REPO / "train.py"), "launch=srun", "parallel.tp=4", "parallel.dp=2"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "needs 8 ranks" in done.stderr and "4 GPUs" in done.stderr, done.stderr


def test_points_at_the_same_time_are_left_to_the_queue(allocation, cfg_of):
    allocation("GRES=", SLURM_JOB_CPUS_PER_NODE="2(x2)")
    cfg = cfg_of("parallel=tp2")
    cfg.launch.parallel_points = 2
    assert ["hydra/launcher=submitit_slurm" in sentence for sentence in slurm.problems(cfg)] == [True]


def test_submitting_without_a_cluster_or_slurm_is_refused_before_anything_starts(train):
    done = train("-m", "hydra/launcher=submitit_slurm", "parallel=single,tp2", env={"PATH": "/nowhere"})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for words in ("#0 parallel=single: cluster.devices_per_node is not set", "#1 parallel=tp2: ", "sbatch"):
        assert words in done.stderr


def test_the_options_of_an_allocation_are_not_taken_for_those_of_a_step(allocation, cfg_of, tmp_path):
    allocation("GRES=", SLURM_JOB_CPUS_PER_NODE="2(x2)", SLURM_NTASKS="64", SLURM_CPU_BIND="quiet", SLURM_CONF="/c")
    step = srun.Step(tmp_path / "ranks", cfg_of("parallel=tp2"))
    named = {name for name in step._environment() if name.startswith("SLURM_")}
    assert named == {"SLURM_CONF", "SLURM_JOB_ID", "SLURM_HOSTFILE"}
    step.end(in_haste=lambda: True)


class Task:
    """One task of a step that asks for `entry`, spoken to as srun would."""

    def __init__(self, folder: Path, entry: list[str]):
        variables = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
        variables |= {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "PYTHONPATH": str(REPO)}
        self.folder, self.order = folder, {"entry": entry, "env": {"OWN": "yes", "HOME": None}, "master": ["host", 77]}
        command = [sys.executable, "-m", "parallel.slurm_task", str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | variables, cwd=folder, **pipes)

    def say(self, *orders) -> None:
        for order in orders:
            self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def report(self) -> dict:
        line = self.process.stderr.readline()
        assert line.startswith(MARK), line
        return json.loads(line.removeprefix(MARK))

    def end(self) -> int:
        _, rest = self.process.communicate(timeout=30)
        assert not rest
        return self.process.returncode


def test_a_task_gives_its_rank_what_torch_needs_and_tells_its_end(tmp_path):
    script = "import os, json; print(json.dumps(dict(os.environ))); raise SystemExit(3)"
    task = Task(tmp_path, [sys.executable, "-c", script])
    task.say("place", task.order)  # asked too early where it stands: there is nothing to say
    assert task.report() == {"rank": 1, "code": 3, "itself": True, "out_of_memory": False}
    assert task.end() == 0
    env = json.loads((tmp_path / "rank1.log").read_text())
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OWN")
    assert [env[name] for name in names] == ["host", "77", "1", "1", "3", "2", "yes"] and "HOME" not in env


@pytest.mark.parametrize("how", ["stop", "the launcher is gone"])
def test_a_task_lets_its_rank_close_when_it_has_to_end(tmp_path, how):
    script = (
        "import signal, sys, time, pathlib\n"
        "def close(*_): pathlib.Path('closed').touch(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, close); pathlib.Path('up').touch(); time.sleep(100)"
    )
    task = Task(tmp_path, [sys.executable, "-c", script])
    task.say(task.order)
    while not (tmp_path / "up").exists():
        assert task.process.poll() is None
    if how == "stop":
        task.say("stop")
    else:
        task.process.stdin.close()
        task.process.stdin = None
    assert task.report() == {"rank": 1, "code": 143, "itself": False, "out_of_memory": False}
    assert task.end() == 0 and (tmp_path / "closed").exists()


def test_a_task_that_is_stopped_before_it_began_starts_nothing(tmp_path):
    task = Task(tmp_path, [sys.executable, "-c", "print('started')"])
    task.say("stop", task.order)
    assert task.end() == 0 and not (tmp_path / "rank1.log").exists()
