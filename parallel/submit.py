"""Points of a sweep as SLURM jobs: one job a point, asking for what that point's ranks need, then followed to its end.

submitit writes and submits the batch script. In the job `train.py --point RUN_DIR` takes over, starts the ranks with
srun and writes result.json, as on one machine. Nothing here imports torch.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parallel import slurm
from parallel.failure import short
from parallel.resolve import resolve, world_size

SHARED_S = 60.0  # until a file written on one node is seen on another
ASK_S = 60.0
_TRAIN = Path(__file__).resolve().parent.parent / "train.py"
# What SLURM says of a job whose point could not say it better, as a status of result.json.
_STATUS = {
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "CANCELLED": "interrupted",
    "PREEMPTED": "interrupted",
}


class NotSubmitted(Exception):
    """sbatch refused a job; `str()` is its reason in one line."""


def problems(cfg) -> list[str]:
    """Why no job can be submitted for a point from here, whatever its layout."""
    found = []
    if not cfg.cluster.devices_per_node:
        found.append(
            "cluster.devices_per_node is not set, so it is open how many ranks a node takes: choose a cluster (such as "
            "cluster=h100_x8) or set it."
        )
    if shutil.which("sbatch") is None:
        found.append("hydra/launcher=submitit_slurm needs SLURM's sbatch, which is not on PATH of this machine.")
    try:
        import submitit  # noqa: F401
    except ModuleNotFoundError:
        found.append("hydra/launcher=submitit_slurm needs the package submitit: pip install 'tripod[slurm]'.")
    return found


def gpus(cfg) -> int:
    """GPUs that the point may count on: those of cluster.nodes, more where its layout names more, none on CPUs."""
    if cfg.launch.device == "cpu":
        return 0
    there = (cfg.cluster.devices_per_node or 0) * cfg.cluster.nodes
    return max(there, world_size(resolve(cfg, there)))


def resources(cfg) -> dict[str, int]:
    """Nodes, ranks a node and GPUs a node of a resolved point, by sbatch's names."""
    placed = slurm.place(cfg, cfg.cluster.devices_per_node)
    asked = {"nodes": placed.nodes, "ntasks_per_node": placed.per_node}
    return asked if cfg.launch.device == "cpu" else asked | {"gpus_per_node": placed.per_node}


@dataclass
class Job:
    """One submitted point. `state` is SLURM's word; `ended` tells when the job was first missed in the queue."""

    run_dir: Path
    id: str
    state: str = "PENDING"
    ended: float | None = None


def submit(run_dir: Path, cfg, name: str, options: dict) -> Job:
    """Submit the point that is frozen in `run_dir`; `options` are those of submitit's SlurmExecutor.

    Raises NotSubmitted.
    """
    import submitit

    from tracking import result

    # Of an earlier try: what is there afterwards is this job's, unless it goes on from a checkpoint.
    result.clear(run_dir, history=cfg.checkpoint.resume != "auto")
    # exec, so that SLURM's signals reach the program and not a shell that waits for it.
    executor = submitit.SlurmExecutor(folder=run_dir / "slurm", python=f"exec {sys.executable}")
    parameters = {"job_name": name, "use_srun": False, "stderr_to_stdout": True} | resources(cfg) | options
    # submitit has SLURM send USR2 before the time limit, which would end the ranks at once; CONT does nothing.
    parameters["additional_parameters"] = {"signal": "CONT@30"} | (options.get("additional_parameters") or {})
    executor.update_parameters(**parameters)
    command = [sys.executable, "-u", str(_TRAIN), "--point", str(run_dir.resolve())]
    try:
        return Job(run_dir, executor.submit(os.execv, sys.executable, command).job_id)
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise NotSubmitted(" ".join(str(error).split())) from None


def follow(jobs: list[Job], poll_s: float) -> Iterator[Job]:
    """Each job when it starts to run and when it has ended, until all have; its result.json is complete then."""
    waiting = list(jobs)
    while waiting:
        states = _states()
        for job in list(waiting) if states is not None else ():
            state = states.get(job.id)
            if state is None:
                job.ended = job.ended or time.monotonic()
                if _settled(job):
                    waiting.remove(job)
                    yield job
            elif state == "RUNNING" and job.state == "PENDING":
                job.state = state
                yield job
        if waiting:
            time.sleep(poll_s)


def cancel(jobs: list[Job]) -> None:
    """End jobs, running or not; a running one has the time to close its files."""
    if jobs:
        subprocess.run(["scancel", *(job.id for job in jobs)], capture_output=True, timeout=ASK_S)


def queue(columns: str) -> dict[str, str]:
    """Two columns, as squeue names them, of this user's jobs that have not ended; the second by the first."""
    asked = ["squeue", "--noheader", "--me", f"--format={columns}"]
    listing = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
    return dict(line.rsplit(maxsplit=1) for line in listing.splitlines())


def _states() -> dict[str, str] | None:
    try:
        return queue("%i %T")
    except (OSError, subprocess.SubprocessError) as error:
        print(f"squeue does not answer, asking again: {error}", file=sys.stderr)
        return None


def _settled(job: Job) -> bool:
    """Whether the ended job's result.json says how it ended; what the job could not say is taken from SLURM."""
    from tracking import result, wandb_close

    state, seen = _final_state(job.id), result.load(job.run_dir).get("status")
    job.state = state or "ENDED"
    if state == "COMPLETED" and seen is None and time.monotonic() - job.ended < SHARED_S:
        return False
    if state in _STATUS and seen in (None, "failed", "interrupted"):
        status, cause = _STATUS[state], f"SLURM ended job {job.id}: {state}"
    elif seen is None:
        status = "failed"
        cause = f"SLURM job {job.id} ended without a result: {state or 'its state is not known any more'}"
    else:
        return True
    result.complete(job.run_dir, status, f"{cause} (output: {short(output(job))})")
    if problem := wandb_close.close(job.run_dir):
        print(problem, file=sys.stderr)
    return True


def _final_state(job_id: str) -> str | None:
    """SLURM's word for how a job ended; it forgets minutes later where there is no accounting."""
    asked = ["scontrol", "show", "job", "--oneliner", job_id]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bJobState=(\w+)", answer)
    return found.group(1) if found else None


def output(job: Job) -> Path:
    """What the job wrote to its console."""
    return job.run_dir / "slurm" / f"{job.id}_0_log.out"
