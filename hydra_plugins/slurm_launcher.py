"""hydra/launcher=submitit_slurm: every point of a sweep as a SLURM job of its own, asking for what its ranks need."""

import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from conf.schema import LaunchKind
from hydra_plugins.validated_launcher import ValidatedLauncher
from parallel import signals, submit, sweep
from parallel.compose import check
from parallel.refused import Refused
from tracking import result


@dataclass
class SlurmLauncherConf:
    """What every job asks for besides nodes, ranks and GPUs, which follow from its point; null leaves it to SLURM."""

    _target_: str = "hydra_plugins.slurm_launcher.SlurmLauncher"
    # Minutes after which SLURM ends a job.
    timeout_min: int = 60
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    # CPU cores of one rank.
    cpus_per_task: int | None = None
    # Memory of one node.
    mem_gb: float | None = None
    # Lines of shell before the program starts (module load ...).
    setup: list[str] | None = None
    # Any other option of sbatch by its long name.
    additional_parameters: dict[str, Any] = field(default_factory=dict)
    # Wait for the jobs to end and tell of them; false leaves as soon as they are submitted.
    wait: bool = True
    # Seconds between two looks at the queue.
    poll_s: float = 5.0


ConfigStore.instance().store(group="hydra/launcher", name="submitit_slurm", node=SlurmLauncherConf, provider="tripod")


class SlurmLauncher(ValidatedLauncher):
    """Checks all points, submits a job for each that is not done, and follows the jobs to their end.

    Ctrl-C and SIGTERM cancel the jobs. When only the connection is lost (SIGHUP) they go on, and `resume` finds them.
    """

    def __init__(self, wait: bool, poll_s: float, timeout_min: int, mem_gb: float | None, **options: Any):
        super().__init__()
        self._wait, self._poll_s = wait, poll_s
        asked = options | {"time": timeout_min, "mem": None if mem_gb is None else f"{mem_gb:g}G"}
        self._options = {name: value for name, value in asked.items() if value is not None}

    @staticmethod
    def _check(cfg):
        """The resolved configuration of a point, judged by the cluster's devices and not by this machine's."""
        cfg.launch.kind = LaunchKind.srun
        if problems := submit.problems(cfg):
            raise Refused(problems)
        return check(cfg, gpus=submit.gpus(cfg))

    def _run_all(self, begun: sweep.Sweep, due: list[sweep.Point]) -> None:
        jobs: dict[str, sweep.Point] = {}
        with signals.as_exceptions(signal.SIGTERM):
            left: list[submit.Job] = []
            try:
                there = self._queue()
                for point in due:
                    if job := self._job(begun, point, there):
                        left.append(job)
                        jobs[job.id] = point
                if self._wait:
                    self._follow(left, jobs)
            except BaseException:
                self._cancel(begun, due, left, jobs)
                raise
        if not self._wait:
            sweep.current = None  # nobody waits, so there is nothing to tell of the points yet
            wait = f"python train.py resume={begun.folder} hydra.launcher.wait=true"
            print(f"{len(jobs)} jobs are in the queue. To wait for them:\n{wait}")
            if len(jobs) < len(due):
                sys.exit(1)

    @staticmethod
    def _queue() -> dict[str, str]:
        """The id by the name of every job in the queue."""
        try:
            return submit.queue("%j %i")
        except (OSError, subprocess.SubprocessError) as error:
            raise Refused([f"SLURM does not answer: {error}"]) from None

    def _cancel(self, begun: sweep.Sweep, due: list[sweep.Point], left: list[submit.Job], jobs: dict) -> None:
        """Cancel the jobs of all points, also one of which sbatch was just telling, and wait until they are gone."""
        there = self._queue()
        for point in due:
            job_id = there.get(_name(begun, point))
            if job_id and job_id not in jobs:
                left.append(submit.Job(begun.run_dir(point).absolute(), job_id))
                jobs[job_id] = point
        if left:
            print(f"\ncancelling {_many(len(left), 'job')}", file=sys.stderr)
            submit.cancel(left)
            self._follow(left, jobs)

    def _job(self, begun: sweep.Sweep, point: sweep.Point, there: dict[str, str]) -> submit.Job | None:
        """The job of a point: one that an earlier command left in the queue, or a new one; None when SLURM refuses."""
        run_dir, name = begun.run_dir(point).absolute(), _name(begun, point)
        if name in there:
            print(f"{point}: job {there[name]} is in the queue already", flush=True)
            return submit.Job(run_dir, there[name])
        begun.freeze(point)
        try:
            job = submit.submit(run_dir, point.cfg, name, self._options)
        except submit.NotSubmitted as refusal:
            result.complete(run_dir, "failed", str(refusal))
            print(f"{point}: failed: {refusal}", flush=True)
            return None
        asked = submit.resources(point.cfg)
        nodes, ranks = asked["nodes"], asked["ntasks_per_node"]
        print(f"{point}: job {job.id} asks for {_many(nodes, 'node')} of {_many(ranks, 'rank')}", flush=True)
        return job

    def _follow(self, left: list[submit.Job], jobs: dict[str, sweep.Point]) -> None:
        """Tell of each job as it starts and ends; those that have ended are taken from `left`."""
        for job in submit.follow(left, self._poll_s):
            if job.ended is None:
                print(f"{jobs[job.id]}: job {job.id} runs", flush=True)
                continue
            left.remove(job)
            outcome = result.load(job.run_dir)
            cause = f": {outcome['cause']}" if outcome["cause"] else ""
            print(f"{jobs[job.id]}: {outcome['status']}{cause}", flush=True)


def _name(begun: sweep.Sweep, point: sweep.Point) -> str:
    """The job's name, by which it is found again."""
    return f"{begun.folder.resolve().name}-{point.number}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"
