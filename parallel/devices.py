"""How many GPUs a run may use, found without importing torch."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path


def visible_gpus() -> int:
    """NVIDIA GPUs that the ranks will see: those of the machine, cut down by CUDA_VISIBLE_DEVICES."""
    there = _machine_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or there == 0:
        return there
    count = 0
    for device in chosen.split(","):
        device = device.strip()
        # CUDA stops reading at the first device that does not exist.
        if not device or (device.lstrip("-").isdigit() and not 0 <= int(device) < there):
            break
        count += 1
    return count


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
