"""What the tests share: the program as a user starts it, in a folder of its own, with and without GPUs in sight."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import checkpointed
import pytest
from omegaconf import OmegaConf

from benchmarks.setting import ONLY_RANK, only_rank
from conf.schema import Config
from parallel import compose

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A run of six steps with a checkpoint after the third and the sixth, for the tests of checkpoints."""
    return checkpointed.runner(tmp_path_factory.mktemp("runs"))("trained", *checkpointed.TRAINED)


@pytest.fixture
def plain_env() -> dict[str, str]:
    """The environment without what a developer's shell adds: no W&B account, no GPU, no launcher's variables."""
    unwanted = ("WANDB_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "HYDRA_")
    if os.environ.get("LAUNCH") != "srun":  # make slurm-check has its own allocation
        unwanted += ("SLURM_",)
    env = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return env | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def train(tmp_path: Path, plain_env: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`train("parallel=tp2", timeout=60)` runs train.py to its end, with runs/ in the test's own folder."""

    def run(*words: str, timeout: float = 60, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(REPO / "train.py"), *words]
        env = plain_env | (env or {})
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout)

    return run


@pytest.fixture
def eight_gpus(tmp_path: Path, plain_env: dict[str, str]) -> dict[str, str]:
    """An environment whose nvidia-smi lists eight GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    lines = "".join(f"echo 'GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n})'\n" for n in range(8))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{plain_env['PATH']}", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.fixture
def cfg_of() -> Callable[..., Config]:
    """`cfg_of("model=tiny")` is the checked configuration that a rank would read."""

    def config(*overrides: str) -> Config:
        composed, *_ = compose.compose(["launch.device=cpu", "parallel=single", *overrides])
        return OmegaConf.to_object(compose.check(composed))

    return config


@pytest.fixture(scope="session")
def single_rank() -> None:
    """This process as the only rank of a run on the CPU: Megatron-core can be used, with the stand-in installed."""
    from parallel import groups, quiet

    only_rank()
    quiet.libraries()
    composed, *_ = compose.compose(["launch.device=cpu", "parallel=single"])
    groups.start(OmegaConf.to_object(compose.check(composed)))
    for name in ONLY_RANK:
        del os.environ[name]
