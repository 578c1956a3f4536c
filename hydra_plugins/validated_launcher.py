"""The launcher of sweeps on this machine: checks every point before the first starts, and accounts for every one."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from omegaconf import DictConfig

from parallel import concurrent, points, signals, sweep
from parallel.compose import check, remove_unless_used
from parallel.refused import Refused
from tracking import result


@dataclass
class ValidatedLauncherConf:
    """Entry of the group `hydra/launcher`."""

    _target_: str = "hydra_plugins.validated_launcher.ValidatedLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="validated", node=ValidatedLauncherConf, provider="tripod")


class ValidatedLauncher(BasicLauncher):
    """Checks all points, lists the problems of all of them, and only then runs one after another."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the points that are not done; one that fails is recorded and the next runs.

        Raises Refused, naming point and problem, before the first if any of them cannot run.
        """
        setup_globals()
        loader, folder = self.hydra_context.config_loader, Path(str(self.config.hydra.sweep.dir))
        planned = points.plan(loader, self.config, job_overrides, self._check)
        try:
            begun, due = points.begin(folder, self.config, planned, sys.argv[1:])
        except (Refused, KeyboardInterrupt, SystemExit):
            remove_unless_used(folder, {"multirun.yaml"})
            raise
        self._run_all(begun, due)
        return [self._returned(begun, point) for point in planned]

    _check = staticmethod(check)

    def _run_all(self, begun: sweep.Sweep, due: list[sweep.Point]) -> None:
        at_once = self.config.launch.parallel_points
        with signals.as_exceptions(signal.SIGTERM, signal.SIGHUP):
            if at_once > 1:
                return concurrent.run(begun, due, at_once)
            view = points.HydraView(self.config)
            for place, point in enumerate(due, start=1):
                print(f"\n──── {point} ──── {place} of {len(due)}", flush=True)
                self._run(begun, point, view.config(point))

    def _run(self, begun: sweep.Sweep, point: sweep.Point, full: DictConfig) -> None:
        begun.freeze(point)
        job = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=full,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if job.status is JobStatus.FAILED:
            # Not a failure of the ranks, of which the task function tells, but one of starting them.
            error = job._return_value
            cause = f"{type(error).__name__}: {error}"
            print(cause, file=sys.stderr)
            result.complete(begun.run_dir(point), "failed", cause)

    def _returned(self, begun: sweep.Sweep, point: sweep.Point) -> JobReturn:
        """What the sweeper gets to hear of a point: its outcome, or that it has none."""
        status = begun.status(point)
        job = JobReturn(overrides=point.overrides, status=JobStatus.COMPLETED)
        # Hydra's own sweepers would stop at the first failure; those that search have to know of each.
        if status != "ok" and self.config.hydra.runtime.choices["hydra/sweeper"] not in ("checked", "basic"):
            job.status, job.return_value = JobStatus.FAILED, sweep.PointFailed(f"{point} ended as {status}.")
        else:
            job.return_value = begun.outcome(point)
        return job
