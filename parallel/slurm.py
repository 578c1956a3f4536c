"""What SLURM gives a run: the allocation this process is in, and how ranks are laid over nodes.

Nothing here imports torch. Only two questions are put to SLURM, both to `scontrol`.
"""

import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

from parallel.resolve import whole, world_size

ASK_S = 30  # a busy controller answers late


class NoAllocation(Exception):
    """There is no allocation to start ranks in; `str()` is one sentence with the remedy."""


@dataclass(frozen=True)
class Allocation:
    """Nodes of the job this process belongs to, in SLURM's order."""

    job: str
    hosts: tuple[str, ...]
    # CPUs of the job on each host.
    cpus: tuple[int, ...]
    # GPUs of the job on each host.
    gpus: int

    def capacity(self, cfg) -> int:
        """Ranks that one node takes: its GPUs; on CPUs cluster.devices_per_node where it is set, else one a CPU."""
        if cfg.launch.device == "cpu":
            return cfg.cluster.devices_per_node or min(self.cpus)
        return self.gpus


@dataclass(frozen=True)
class Placement:
    """Ranks over nodes: `per_node` consecutive ranks on each, what is left on the last."""

    nodes: int
    per_node: int


def place(cfg, capacity: int) -> Placement:
    """As few nodes as `capacity` ranks a node allow, filled evenly; `cfg` is resolved.

    A tensor-parallel group talks after every layer, so it is kept inside a node where it fits into one.
    """
    ranks, tp = world_size(cfg), whole(cfg.parallel.tp)
    unit = tp if tp <= capacity else 1
    nodes = math.ceil(ranks / (capacity // unit * unit))
    return Placement(nodes, math.ceil(ranks / nodes / unit) * unit)


def hosts(cfg, there: Allocation) -> list[str]:
    """The host of each rank. CPU ranks for which the allocation has no room share its CPUs evenly."""
    placed, ranks = place(cfg, there.capacity(cfg)), world_size(cfg)
    per_node = placed.per_node if placed.nodes <= len(there.hosts) else math.ceil(ranks / len(there.hosts))
    return [there.hosts[rank // per_node] for rank in range(ranks)]


def gpus() -> int:
    """GPUs of the whole allocation; none where there is no allocation, of which `problems` tells."""
    try:
        there = allocation()
    except NoAllocation:
        return 0
    return there.gpus * len(there.hosts)


def problems(cfg) -> list[str]:
    """Why launch=srun cannot start the ranks of this resolved and otherwise legal configuration from here."""
    try:
        there = allocation()
    except NoAllocation as missing:
        return [str(missing)]
    if cfg.launch.parallel_points > 1:
        return [
            f"launch.parallel_points={cfg.launch.parallel_points} shares out the GPUs of one machine: leave it out "
            "with launch=srun, or take hydra/launcher=submitit_slurm, with which SLURM runs as many points at once as "
            "fit."
        ]
    if cfg.launch.device == "cpu" or place(cfg, there.capacity(cfg)).nodes <= len(there.hosts):
        return []
    return [
        f"{world_size(cfg)} ranks in tensor-parallel groups of {cfg.parallel.tp} need more than the {len(there.hosts)} "
        f"nodes of {there.gpus} GPUs of this allocation: take a parallel.tp that divides {there.gpus}, or more nodes."
    ]


def allocation() -> Allocation:
    """The allocation this process is in; raises NoAllocation when there is none."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        raise NoAllocation(
            "launch=srun starts ranks inside a SLURM allocation and this is none: run it under salloc or in an sbatch "
            "script, or take hydra/launcher=submitit_slurm, which asks for one."
        )
    for program in ("srun", "scontrol"):
        if shutil.which(program) is None:
            raise NoAllocation(f"launch=srun needs SLURM's {program}, which is not on PATH of this machine.")
    return _allocation(job)


@cache
def _allocation(job: str) -> Allocation:
    names = tuple(_scontrol("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split())
    cpus = tuple(expand(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))) or (1,) * len(names)
    on_this_node = os.environ.get("SLURM_GPUS_ON_NODE")  # set in batch scripts and steps, not in the shell of salloc
    if on_this_node:
        gpus = int(on_this_node)
    else:
        # One entry for each group of nodes, as in GRES=gpu:h100:8(IDX:0-7); told without accounting, too.
        on_each = re.findall(r"\bGRES=\S*?gpu(?::[^:(,\s]+)?:(\d+)\(", _scontrol("show", "--details", "job", job))
        gpus = min(map(int, on_each), default=0)
    return Allocation(job, names, cpus, gpus)


def _scontrol(*words: str) -> str:
    try:
        return subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, timeout=ASK_S, check=True, errors="replace"
        ).stdout
    except subprocess.CalledProcessError as error:
        raise NoAllocation(f"SLURM does not know this allocation: scontrol says {error.stderr.strip()!r}.") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAllocation(f"SLURM does not answer: {error}.") from None


def local_world_size() -> int | None:
    """Tasks that this process's step has on this node; None outside a step."""
    on_each = expand(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(os.environ.get("SLURM_NODEID", "0"))
    return on_each[node] if node < len(on_each) else None


def expand(counts: str) -> list[int]:
    """SLURM's short form of a number for each node: `4(x2),2` is [4, 4, 2]."""
    return [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
