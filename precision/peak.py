"""What the device could do at best: the denominator of MFU, always with its source."""

import functools
import time
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from conf.schema import Compute, Config, Fp8

CLUSTERS = Path(__file__).resolve().parent.parent / "conf" / "cluster"
_MEASURED = {Compute.bf16: torch.bfloat16}


def device_name() -> str:
    """Name of the GPU, or of the CPU with the threads that this rank has."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    threads = torch.get_num_threads()
    return f"CPU ({model}, {threads} thread{'s' if threads > 1 else ''} a rank)"


def dense_peak(cfg: Config) -> dict | None:
    """Peak of one device in the compute format: `{"tflops", "source", "name"}`, or None for an unknown device.

    Every rank must call it: on a CPU it is measured, by all ranks at once since they share the cores.
    """
    compute = Compute.bf16 if cfg.precision.fp8 is Fp8.emulated else cfg.precision.compute
    if not torch.cuda.is_available():
        return _measure(compute, dist.get_world_size())
    name = torch.cuda.get_device_name()
    for cluster in [cfg.cluster, *map(OmegaConf.load, sorted(CLUSTERS.glob("*.yaml")))]:
        if cluster.device == name and compute.value in cluster.peak_tflops:
            kind = f"dense {compute.value.upper()}"
            return {
                "tflops": cluster.peak_tflops[compute.value],
                "source": f"{kind} peak of {cluster.device}, conf/cluster/{cluster.name}.yaml",
                "name": kind,
            }
    return None


@functools.cache  # a process may train more than one point
def _measure(compute: Compute, ranks: int, size: int = 768, seconds: float = 0.5) -> dict:
    """The best of repeated products of two square matrices; FP16 and TF32 are computed in FP32 on a CPU.

    The products are short, a few milliseconds, so that some of them go undisturbed on a machine that is busy.
    """
    dtype = _MEASURED.get(compute, torch.float32)
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    if ranks > 1:
        dist.barrier()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    kind = "BF16" if dtype is torch.bfloat16 else "FP32"
    return {
        "tflops": 2 * size**3 / best / 1e12,
        "source": f"a {kind} matrix product of size {size} measured at start, all ranks at once",
        "name": f"measured {kind} product",
    }
