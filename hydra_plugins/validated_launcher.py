"""Hydra's own launcher, except that every point of a sweep is checked before the first one starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, filter_overrides
from omegaconf import OmegaConf

from parallel.compose import Refused, check, remove_unless_used


@dataclass
class ValidatedLauncherConf:
    """Entry of the group `hydra/launcher`."""

    _target_: str = "hydra_plugins.validated_launcher.ValidatedLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="validated", node=ValidatedLauncherConf, provider="tripod")


class ValidatedLauncher(BasicLauncher):
    """Checks all points, lists the problems of all of them, and only then runs one after another."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the points; raises Refused, naming point and problem, before the first if any of them cannot run."""
        found = []
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            try:
                check(OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]))
            except Refused as refusal:
                words = " ".join(filter_overrides(overrides))
                found += [f"#{number} {words}: {sentence}" for sentence in refusal.sentences]
        if found:
            remove_unless_used(Path(str(self.config.hydra.sweep.dir)), "multirun.yaml")
            raise Refused(found)
        return super().launch(job_overrides, initial_job_idx)
