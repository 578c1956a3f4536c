"""From the words of a sweep's points to checked points."""

import copy
from collections.abc import Sequence
from pathlib import Path

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import filter_overrides
from omegaconf import DictConfig, OmegaConf

from parallel import resume, sweep
from parallel.assemble import CLASSES, Assembler
from parallel.compose import check
from parallel.frozen import config_hash
from parallel.refused import Refused
from parallel.sweep import Point, Sweep


def plan(loader, master: DictConfig, job_overrides: Sequence[Sequence[str]], checked=check) -> list[Point]:
    """The points that Hydra's sweeper asks for, composed and checked by `checked(cfg)`; nothing is started.

    `loader` is Hydra's config loader, `master` its configuration of the sweep.
    """
    points, composed = [], Assembler(loader, master)
    for words in job_overrides:
        cfg, choices = composed(words)
        point = Point(
            words=list(words),
            overrides=[word for word in filter_overrides(words) if resume.key(word) not in resume.OWN],
            choices=choices,
            cfg=None,
            config_hash=None,
        )
        try:
            point.cfg = checked(cfg)
            point.config_hash = config_hash(point.cfg)
        except Refused as refusal:
            point.problems = refusal.sentences
        points.append(point)
    return points


def begin(folder: Path, master: DictConfig, planned: list[Point], command: list[str]) -> tuple[Sweep, list[Point]]:
    """The sweep in `folder` with these points, and those of them that are to run now.

    Raises Refused, with all problems, when points cannot run and `sweep.skip_illegal` does not say to leave them out.
    """
    refused = [point for point in planned if point.problems]
    if refused and not (master.sweep.skip_illegal and len(refused) < len(planned)):
        raise Refused([f"#{planned.index(p)} {' '.join(p.overrides)}: {line}" for p in refused for line in p.problems])
    begun = sweep.current or Sweep(folder, command, master)
    due = begun.take(planned, HydraView(master).folder)
    sweep.current = begun
    for point in refused:
        print(*(f"skipped {point}: {line}" for line in point.problems), sep="\n")
    done = len(planned) - len(refused) - len(due)
    if done:
        print(f"{done} of {len(planned)} points are done already, {len(due)} are left to run.")
    return begun, due


class HydraView:
    """A point as Hydra would show it, made without a file, since files may be edited while a sweep runs."""

    def __init__(self, master: DictConfig):
        hydra = OmegaConf.structured(HydraConf)
        OmegaConf.set_struct(hydra, False)
        hydra = OmegaConf.merge(hydra, OmegaConf.to_container(master.hydra))
        hydra.sweep.dir = str(master.hydra.sweep.dir)  # with the time at which the sweep began
        self._full = OmegaConf.create({"hydra": hydra})
        template = OmegaConf.to_container(master.hydra.sweep)["subdir"]
        self._asks_hydra = "${hydra:" in template
        self._named = [group for group in CLASSES if f"${{{group}." in template]

    def folder(self, point: Point) -> str:
        """The folder's name that hydra.sweep.subdir gives a point that has its number."""
        self._set(point, self._named if point.cfg else [])
        if self._asks_hydra:
            HydraConfig.instance().set_config(self._full)
        return str(self._full.hydra.sweep.subdir)

    def config(self, point: Point) -> DictConfig:
        """What Hydra starts a job with; the job runs in the folder that the point has."""
        self._set(point, list(CLASSES))
        full = copy.deepcopy(self._full)
        full.hydra.sweep.subdir = point.folder
        full.hydra.overrides.task = point.overrides
        return full

    def _set(self, point: Point, groups: list[str]) -> None:
        hydra = self._full.hydra
        OmegaConf.set_readonly(hydra, False)  # HydraConfig has made it so
        hydra.job.id = hydra.job.num = point.number
        hydra.job.override_dirname = ",".join(sorted(point.overrides))
        hydra.runtime.choices.update(point.choices)
        for group in groups:
            self._full[group] = getattr(point.cfg, group)
