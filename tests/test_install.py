"""The set-up behind make: which Python is taken, when packages are installed again, what the constraints ask for."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parent.parent
PYTHON = Path(sys._base_executable)
pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="needs to run under the Python it looks for")


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def find_python(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Look for Python with nothing on PATH but a few system tools and what the test put into `bin`."""
    for tool in ("bash", "cat", "dirname", "ls", "sort"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    env = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    command = ["bash", str(REPO / ".ci" / "find-python")]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_a_plain_python_is_found(tmp_path):
    script(tmp_path / "bin" / "python3.12", f'exec {PYTHON} "$@"')
    assert Path(find_python(tmp_path).stdout.strip()).samefile(PYTHON)


def test_pyenvs_python_is_found_behind_a_shim_that_leads_nowhere(tmp_path):
    script(tmp_path / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    script(tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin" / "python3", f'exec {PYTHON} "$@"')
    assert Path(find_python(tmp_path).stdout.strip()).samefile(PYTHON)


def test_uvs_python_is_found(tmp_path):
    script(tmp_path / "uv-managed" / "python", f'exec {PYTHON} "$@"')
    script(tmp_path / "bin" / "uv", f'[ "$*" = "python find 3.12" ] && echo {tmp_path}/uv-managed/python')
    assert Path(find_python(tmp_path).stdout.strip()).samefile(PYTHON)


def test_a_missing_python_is_one_sentence(tmp_path):
    script(tmp_path / "bin" / "python3", "exit 1")
    run = find_python(tmp_path)
    assert run.returncode == 1 and run.stdout == ""
    assert len(run.stderr.splitlines()) == 1 and "Python 3.12" in run.stderr and "install it" in run.stderr


def test_packages_are_installed_once_and_again_when_the_lists_change(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".python-version"):
        shutil.copy(REPO / name, tmp_path)
        os.utime(tmp_path / name, (1, 1))

    def what_make_would_do() -> str:
        run = subprocess.run(["make", "-n", "test"], cwd=tmp_path, capture_output=True, text=True, check=True)
        return run.stdout

    assert "venv .venv" in what_make_would_do() and "pip install" in what_make_would_do()
    script(tmp_path / ".venv" / "bin" / "python", "exit 0")
    (tmp_path / ".venv" / ".ready").touch()
    assert "pip install" not in what_make_would_do() and "pytest" in what_make_would_do()
    (tmp_path / "constraints.txt").touch()
    os.utime(tmp_path / ".venv" / ".ready", (2, 2))
    assert "pip install" in what_make_would_do()
    (tmp_path / ".venv" / ".ready").touch()
    (tmp_path / ".venv" / "bin" / "python").unlink()
    assert "venv .venv" in what_make_would_do()


def test_constraints_fit_the_ranges_and_force_no_cuda_package():
    lines = [line for line in (REPO / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines)
    tested = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines)}
    assert not [name for name in tested if name.startswith(("nvidia", "cuda", "triton"))]
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = Requirement(text)
        assert tested[requirement.name] in requirement.specifier, text
