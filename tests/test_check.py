"""`python -m parallel.check`: what stops a run is said with the way out, without importing anything heavy."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def check(env: dict[str, str], *interpreter: str) -> subprocess.CompletedProcess[str]:
    command = [*(interpreter or [sys.executable]), "-m", "parallel.check"]
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=60)


def fake_gpus(folder: Path, env: dict[str, str], cuda: str, per_gpu: str) -> dict[str, str]:
    """An environment whose nvidia-smi shows two GPUs and a driver for `cuda`."""
    folder.mkdir()
    script = f"""#!/bin/sh
case "$*" in
-L) echo 'GPU 0: NVIDIA H100'; echo 'GPU 1: NVIDIA H100';;
--query*) echo '{per_gpu}'; echo '{per_gpu}';;
*) echo '| NVIDIA-SMI 550.54  Driver Version: 550.54  CUDA Version: {cuda} |';;
esac
"""
    (folder / "nvidia-smi").write_text(script)
    (folder / "nvidia-smi").chmod(0o755)
    env = {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}
    return env | {"PATH": f"{folder}{os.pathsep}{env['PATH']}"}


def test_this_machine_can_run(plain_env):
    done = check(plain_env)
    assert done.returncode == 0, done.stdout
    for what in ("Python", "packages", "devices", "/dev/shm", "port", "W&B", "runs", "memory", "cores"):
        assert f" {what} " in done.stdout
    assert "Nothing here stops a run." in done.stdout and "For a bug report:\n```\nsystem " in done.stdout
    assert "torch 2." in done.stdout and "offline" in done.stdout


def test_torch_is_not_imported(plain_env):
    code = "import sys; sys.argv = ['check']; from parallel import check; check.main(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=plain_env, capture_output=True, text=True)
    assert done.stdout.endswith("\nFalse\n")


def test_missing_packages_stop_a_run(plain_env):
    done = check(plain_env, sys.executable, "-S")
    assert done.returncode == 1
    assert "STOP  packages   nothing is installed" in done.stdout and "fix: run `make train`" in done.stdout


def test_an_old_driver_or_a_torch_without_cuda_stops_a_run(plain_env, tmp_path):
    done = check(fake_gpus(tmp_path / "bin", plain_env, "9.2", "NVIDIA H100, 81559 MiB, 550.54"))
    assert "2 x NVIDIA H100, 81559 MiB, driver 550.54." in done.stdout
    assert done.returncode == 1
    assert "supports 9.2" in done.stdout or "has no CUDA and there are GPUs" in done.stdout


def test_a_folder_that_cannot_be_written_to_stops_a_run(plain_env):
    command = [sys.executable, "-m", "parallel.check"]
    env = plain_env | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd="/proc", env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "STOP  runs       /proc cannot be written to" in done.stdout and "hydra.run.dir=" in done.stdout


def test_the_bug_report_does_not_name_the_user(plain_env, tmp_path):
    done = check(plain_env | {"HOME": sys.prefix})
    report = done.stdout.split("For a bug report:")[1]
    assert sys.prefix not in report and "Python " in report
