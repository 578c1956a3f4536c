"""Which GPUs a run may use, found without importing torch."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path


def visible_gpus() -> int:
    """NVIDIA GPUs that the ranks will see: those of the machine, cut down by CUDA_VISIBLE_DEVICES."""
    return len(visible_devices())


def visible_devices() -> list[str]:
    """Those GPUs as CUDA_VISIBLE_DEVICES names them."""
    there = _machine_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or there == 0:
        return [str(number) for number in range(there)]
    found = []
    for device in chosen.split(","):
        device = device.strip()
        # CUDA stops reading at the first device that does not exist.
        if not device or (device.lstrip("-").isdigit() and not 0 <= int(device) < there):
            break
        found.append(device)
    return found


FP8_FROM = 9.0  # Hopper's compute capability


@cache
def capability() -> float | None:
    """The lowest compute capability of this machine's GPUs; None where nvidia-smi does not tell."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()
        return min(map(float, told), default=None)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None


@cache
def _machine_gpus() -> int:
    # nvidia-smi first: inside a container or a batch job it lists only what may be used, /proc lists the node's.
    if shutil.which("nvidia-smi"):
        try:
            listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            listing = None
        if listing is not None and listing.returncode == 0:
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    listed = Path("/proc/driver/nvidia/gpus")
    return len(list(listed.iterdir())) if listed.is_dir() else 0
