"""What on this machine would stop or hinder a run, with the way out: `python -m parallel.check`.

Needs neither torch nor any package, answers in under a second, and exits with 1 when something stops a run.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parallel import host
from parallel.devices import visible_gpus

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
RANK_GIB = 1.0  # torch, Megatron-core and the tiny model


@dataclass
class Finding:
    """One line of the report. `level` is ok, note (works, with a drawback) or STOP (no run will work)."""

    level: str
    what: str
    sentence: str
    fix: str = ""


def python() -> Iterator[Finding]:
    version = platform.python_version()
    if (3, 12) <= sys.version_info[:2] < (3, 14):
        yield Finding("ok", "Python", f"{version} at {sys.executable}.")
    else:
        sentence = f"{version} runs this; Megatron-core 0.19 and Hydra 1.3 need 3.12 or 3.13."
        yield Finding("STOP", "Python", sentence, "install python3.12 and run `make train`, which makes its own .venv.")


def packages() -> Iterator[Finding]:
    try:
        import tomllib

        from packaging.requirements import Requirement
    except ImportError:
        yield Finding("STOP", "packages", "nothing is installed in this Python.", "run `make train` or `make test`.")
        return
    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted = [Requirement(line) for line in tomllib.load(file)["project"]["dependencies"]]
    found = {need.name: _version(need.name) for need in wanted}
    missing = [need.name for need in wanted if not found[need.name]]
    wrong = [need for need in wanted if found[need.name] and not need.specifier.contains(found[need.name], True)]
    if missing:
        yield Finding("STOP", "packages", f"not installed: {', '.join(missing)}.", "run `make train` or `make test`.")
    for need in wrong:
        sentence = f"{need.name} is {found[need.name]}; this project needs {need.specifier}."
        yield Finding("STOP", "packages", sentence, f'pip install "{need}"')
    if not missing and not wrong:
        yield Finding("ok", "packages", ", ".join(f"{name} {version}" for name, version in found.items()) + ".")


def devices() -> Iterator[Finding]:
    gpus = visible_gpus()
    if gpus:
        yield from _gpus(gpus)
    elif list(Path("/dev").glob("nvidia[0-9]*")):
        fix = "install the driver's tools, or start the container with `--gpus all`; look at CUDA_VISIBLE_DEVICES."
        yield Finding("note", "devices", "there are GPUs that this process may not use; ranks compute on the CPU.", fix)
    else:
        yield Finding("ok", "devices", "no NVIDIA GPU: ranks compute on the CPU.")


def _gpus(gpus: int) -> Iterator[Finding]:
    listed = _smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    name, _, driver = (listed.splitlines() or ["unknown, , unknown"])[0].rpartition(", ")
    yield Finding("ok", "devices", f"{gpus} x {name}, driver {driver}.")
    cuda = re.search(r"^cuda\b.*= '?([\d.]+|None)", _torch_version_file(), re.MULTILINE)
    runtime = re.search(r"CUDA Version: *([\d.]+)", _smi())
    if cuda and cuda.group(1) == "None":
        fix = "reinstall torch with CUDA; until then launch.device=cpu."
        yield Finding("STOP", "torch", f"torch {_version('torch')} has no CUDA and there are GPUs.", fix)
    elif cuda and runtime and int(cuda.group(1).split(".")[0]) > int(runtime.group(1).split(".")[0]):
        sentence = f"torch is built for CUDA {cuda.group(1)} and driver {driver} supports {runtime.group(1)}."
        yield Finding("STOP", "driver", sentence, f"update the driver, or install torch for CUDA {runtime.group(1)}.")


def shared_memory() -> Iterator[Finding]:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield Finding("ok" if visible_gpus() < 2 else "STOP", "/dev/shm", "is not there; NCCL needs it.", "mount it.")
        return
    free = shutil.disk_usage(shm).free
    if visible_gpus() > 1 and free < GIB:
        fix = "start the container with --shm-size=8g or --ipc=host, or empty /dev/shm."
        yield Finding("STOP", "/dev/shm", f"{_size(free)} are free; NCCL between GPUs needs about 1 GiB.", fix)
    else:
        yield Finding("ok", "/dev/shm", f"{_size(free)} are free.")


def port() -> Iterator[Finding]:
    """Ranks meet on a port of the loopback interface that the system chooses."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            number = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", number), timeout=2).close()
    except OSError as error:
        fix = "bring the loopback interface up (`ip link set lo up`), and allow local connections in the firewall."
        yield Finding("STOP", "port", f"ranks cannot meet on 127.0.0.1: {error}.", fix)
    else:
        yield Finding("ok", "port", f"the system gives free ports ({number} just now).")


def wandb_mode() -> Iterator[Finding]:
    from tracking.mode import TrackingError, decide

    try:
        mode, reason = decide("auto")
    except TrackingError as error:
        yield Finding("note", "W&B", str(error))
    else:
        yield Finding("ok", "W&B", f"tracking.mode=auto will be {mode} ({reason}).")


def folders() -> Iterator[Finding]:
    for what, folder in (("runs", Path.cwd() / "runs"), ("temporary", Path(tempfile.gettempdir()))):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        try:
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            fix = "hydra.run.dir=PATH puts runs elsewhere." if what == "runs" else "set TMPDIR to another folder."
            yield Finding("STOP", what, f"{there} cannot be written to: {error.strerror}.", fix)
            continue
        if free < GIB // 64:
            yield Finding("STOP", what, f"{_size(free)} are free in {there}.", "make room, or choose another folder.")
        elif free < GIB:
            yield Finding("note", what, f"only {_size(free)} are free in {there}.", "make room for W&B and logs.")
        else:
            yield Finding("ok", what, f"{_size(free)} are free in {there}.")


def memory() -> Iterator[Finding]:
    total, available = host.memory()
    sentence = f"{_size(available)} of {_size(total)} are available; a rank needs about {RANK_GIB:g} GiB at least."
    if available < RANK_GIB * GIB:
        yield Finding("STOP", "memory", sentence, "end other programs, or raise the container's limit.")
    else:
        yield Finding("ok", "memory", sentence)


def cores() -> Iterator[Finding]:
    usable, there = host.cores(), os.cpu_count() or 1
    of = f" of {there} (affinity or quota)" if usable < there else ""
    yield Finding("ok", "cores", f"{usable}{of}; ranks on the CPU share them.")


CHECKS = (python, packages, devices, shared_memory, port, wandb_mode, folders, memory, cores)


def bug_report(findings: list[Finding]) -> str:
    """The block to paste: system, code version and every finding, without the user's name and folders."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}, {_cpu()}"
    lines = [f"system    {system}", f"commit    {_git()}"]
    for finding in findings:
        lines.append(f"{finding.what:<9} {finding.sentence}" + ("" if finding.level == "ok" else f" [{finding.level}]"))
    return "\n".join(lines).replace(str(ROOT), "REPOSITORY").replace(str(Path.cwd()), "HERE").replace(_home(), "~")


def main() -> int:
    findings = [finding for check in CHECKS for finding in check()]
    for finding in findings:
        print(f"{finding.level:<5} {finding.what:<10} {finding.sentence}")
        if finding.fix and finding.level != "ok":
            print(f"{'':<16} fix: {finding.fix}")
    stops = sum(finding.level == "STOP" for finding in findings)
    print("\nNothing here stops a run." if not stops else f"\n{stops} of these stop a run.")
    print(f"\nFor a bug report:\n```\n{bug_report(findings)}\n```")
    return 1 if stops else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_version_file() -> str:
    """torch/version.py, read instead of imported."""
    try:
        return importlib.metadata.distribution("torch").locate_file("torch/version.py").read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""


def _run(*command: str) -> str:
    """What a program prints; empty when it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _smi(*arguments: str) -> str:
    return _run("nvidia-smi", *arguments)


def _git() -> str:
    return _run("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "unknown"


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return model.group(1) if model else platform.processor() or "unknown CPU"


def _home() -> str:
    return str(Path.home()) if len(str(Path.home())) > 1 else "\0"


def _size(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
