"""The README's commands, as a newcomer would type them, only shorter."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import made_runs
import pytest

REPO = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"^```bash\n(.*?)^```", (REPO / "README.md").read_text(), re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.strip()]
MAKE = [line.partition("#")[0].split()[1] for line in LINES if line.startswith("make ")]
NEED_GPUS = [line for line in LINES if "needs 8 GPUs" in line]
RUN = [line for line in LINES if not line.startswith(("make ", ". ")) and line not in NEED_GPUS]
# Later overrides win: the same commands on a small model for two steps.
SHORTER = (
    "train.steps=2 train.global_batch=4 train.micro_batch=1 train.seq_len=32 train.sample_length=0 "
    "train.eval_sequences=4 model.layers=4 model.hidden=32 model.ffn_hidden=64 model.heads=4 model.kv_heads=4"
)


def run(command: str, env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = env | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}
    return subprocess.run(command, shell=True, cwd=REPO, env=env, capture_output=True, text=True, timeout=300)


def test_the_readme_has_its_first_commands_and_five_more():
    assert MAKE[:3] == ["train", "sweep", "test"]
    assert len(RUN) >= 5


@pytest.mark.parametrize("target", MAKE)
def test_make_knows_the_target(target):
    done = subprocess.run(["make", "-n", target], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Many starts or many layouts, or tested elsewhere too; one short sweep stays.
LONG = ("+sweep=", "--search", "precision=fp32,bf16", "data=megatron", "data=text")


@pytest.mark.parametrize(
    "line", [pytest.param(x, marks=pytest.mark.slow) if any(word in x for word in LONG) else x for x in RUN]
)
def test_command_runs(line, plain_env, tmp_path):
    command = line.partition("#")[0].strip()
    if "runs/mine" in command:  # prepared by the line before
        command = command.replace("runs/mine", shlex.quote(str(tmp_path / "mine")))
        if "data.prepare" not in command:
            prepared = next(line for line in RUN if "data.prepare" in line).partition("#")[0].strip()
            run(prepared.replace("runs/mine", shlex.quote(str(tmp_path / "mine"))), plain_env, tmp_path)
    if "train.py" in command and "--cfg" not in command:
        where = "hydra.sweep.dir" if " -m " in command else "hydra.run.dir"
        command += f" {SHORTER} {where}={shlex.quote(str(tmp_path / 'run'))}"
    if "runs/sweeps" in command:  # which a newcomer has by then
        made_runs.sweep(tmp_path / "sweep", steps=5, precision=["fp32", "bf16"])
        command = command.replace("runs/sweeps", shlex.quote(str(tmp_path / "sweep")))
    done = run(command, plain_env, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("line", NEED_GPUS)
def test_command_that_needs_gpus_says_so_without_them(line, plain_env, tmp_path):
    done = run(line.partition("#")[0].strip(), plain_env, tmp_path)
    assert done.returncode == 2
    assert "GPU" in done.stderr and "Traceback" not in done.stderr
