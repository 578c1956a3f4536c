"""hydra/launcher=submitit_slurm: every point of a sweep as a SLURM job of its own, asking for what its ranks need."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from conf.schema import LaunchKind
from parallel import compose, submit
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


@dataclass
class _Point:
    """One composed point: its number, the words that set it apart, and its whole configuration."""

    number: int
    words: str
    full: DictConfig
    resolved: DictConfig

    def freeze(self) -> Path:
        """Make its run folder, as Hydra names it, ready for the job."""
        HydraConfig.instance().set_config(self.full)
        run_dir = Path(str(self.full.hydra.sweep.dir), str(self.full.hydra.sweep.subdir)).absolute()
        compose.freeze(self.resolved, run_dir, compose.chosen(self.full.hydra), list(self.full.hydra.overrides.task))
        return run_dir


class SlurmLauncher(Launcher):
    """Checks all points, submits a job for each, follows the jobs to their end.

    Ctrl-C and SIGTERM cancel the jobs. They go on when only the connection is lost (SIGHUP).
    """

    def __init__(self, wait: bool, poll_s: float, timeout_min: int, mem_gb: float | None, **options: Any):
        self._wait, self._poll_s = wait, poll_s
        asked = options | {"time": timeout_min, "mem": None if mem_gb is None else f"{mem_gb:g}G"}
        self._options = {name: value for name, value in asked.items() if value is not None}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's hook. The task function is not used: a point starts inside its job."""
        self._loader, self._config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the points. Raises Refused before the first job if any cannot run, SystemExit(1) if any failed."""
        points, jobs = self._check(job_overrides, initial_job_idx), {}
        with _sigterm_exits():
            try:
                statuses = [self._submit(point, jobs) for point in points]
                statuses += self._follow(jobs) if self._wait else []
            except BaseException:
                self._cancel(jobs)
                raise
        if not self._wait:
            print(f"{len(jobs)} jobs are in the queue; for the table: python -m tracking.compare {self._folder()}")
        if set(statuses) - {"ok", None}:
            sys.exit(1)
        return []

    def _folder(self) -> Path:
        return Path(str(self._config.hydra.sweep.dir))

    def _check(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[_Point]:
        points, found = [], []
        shared = set.intersection(*map(set, job_overrides))
        for number, overrides in enumerate(job_overrides, start=first):
            full = self._loader.load_sweep_config(self._config, list(overrides))
            with open_dict(full):
                full.hydra.job.id = full.hydra.job.num = number
            cfg = OmegaConf.masked_copy(full, [key for key in full if key != "hydra"])
            cfg.launch.kind = LaunchKind.srun
            words = " ".join(word for word in filter_overrides(overrides) if word not in shared)
            try:
                if problems := submit.problems(cfg):
                    raise compose.Refused(problems)
                resolved = compose.check(cfg, gpus=submit.gpus(cfg))
            except compose.Refused as refusal:
                found += [f"#{number} {words}: {sentence}" for sentence in refusal.sentences]
            else:
                points.append(_Point(number, words, full, resolved))
        if found:
            compose.remove_unless_used(self._folder(), "multirun.yaml")
            raise compose.Refused(found)
        return points

    def _submit(self, point: _Point, jobs: dict[str, tuple[_Point, submit.Job]]) -> str | None:
        """Add the point's job to `jobs`; the point's status when it got none."""
        run_dir = point.freeze()
        try:
            job = submit.submit(run_dir, point.resolved, f"{self._folder().name}-{point.number}", self._options)
        except submit.NotSubmitted as refusal:
            result.complete(run_dir, "failed", str(refusal))
            print(f"#{point.number} {point.words}: failed: {refusal}", flush=True)
            return "failed"
        jobs[job.id] = (point, job)
        asked = submit.resources(point.resolved)
        asks = f"asks for {asked['nodes']} nodes with {asked['ntasks_per_node']} ranks each"
        print(f"#{point.number} {point.words}: job {job.id} {asks}", flush=True)
        return None

    def _follow(self, jobs: dict[str, tuple[_Point, submit.Job]]) -> list[str]:
        """The statuses of the jobs' points, told as they come."""
        statuses = []
        for job in submit.follow([job for _, job in jobs.values()], self._poll_s):
            point = jobs[job.id][0]
            if job.ended is None:
                print(f"#{point.number} {point.words}: job {job.id} runs", flush=True)
                continue
            outcome = result.load(job.run_dir)
            statuses.append(outcome["status"])
            cause = f": {outcome['cause']}" if outcome["cause"] else ""
            print(f"#{point.number} {point.words}: {outcome['status']}{cause}", flush=True)
        return statuses

    def _cancel(self, jobs: dict[str, tuple[_Point, submit.Job]]) -> None:
        left = [job for _, job in jobs.values() if job.ended is None]
        if left:
            print(f"\ncancelling {len(left)} jobs", file=sys.stderr)
            submit.cancel(left)
            self._follow({job_id: entry for job_id, entry in jobs.items() if entry[1].ended is None})


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """SIGTERM ends this process by SystemExit(143), so that the jobs are cancelled as after Ctrl-C."""

    def leave(signum: int, frame: object) -> None:
        sys.exit(128 + signum)

    old = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
