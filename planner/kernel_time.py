"""How long a kernel takes: a matrix product by its tiles, attention by its operations, anything else by its bytes."""

import math
from collections.abc import Iterable
from functools import cache

from planner.device import Device
from planner.operations import Op

# Formats of tensors, and the name of the peak in conf/cluster that their products reach.
PEAKS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Output tiles that libraries have kernels for (rows, columns), and the share of the largest one's speed they reach.
TILES = ((128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.80), (64, 64, 0.65))


def product_s(op: Op, peak: float, bandwidth: float, device: Device) -> float:
    """Seconds of a matrix product: the best tile, dealt out to the processors in whole waves, or its bytes.

    Args:
        peak: dense peak in FLOP/s of the format it is computed in.
        bandwidth: bytes/s of the memory.
    """
    m, n, k, batch = op.shape
    best = min(_tiled(m, n, batch, rows, columns, share, device.processors) for rows, columns, share in TILES)
    operations = 2 * (k + device.inner_extra) * best / (peak * device.product)
    return max(operations, op.bytes / (bandwidth * device.memory)) + device.launch_s


@cache
def _tiled(m: int, n: int, batch: int, rows: int, columns: int, share: float, processors: int) -> float:
    """Output elements that are computed, unused parts of tiles and waves included, at the largest tile's speed."""
    tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
    waves = math.ceil(tiles / processors)
    # A long series of waves overlaps at its seams; one or two do not.
    used = tiles if waves > 8 else waves * processors
    return used * rows * columns / share if processors > 1 else m * n * batch / share


def attention_s(op: Op, peak: float, bandwidth: float, device: Device) -> float:
    """Seconds of causal flash attention: half of the score matrix is computed."""
    share = device.attention_backward if "backward" in op.name else device.attention
    return max(op.flops / 2 / (peak * share), op.bytes / (bandwidth * device.memory)) + device.launch_s


def seconds(op: Op, cluster, device: Device, compute: str) -> float:
    """Seconds of one call on a device of `cluster`; `compute` is the format of products (conf.schema.Compute)."""
    bandwidth = cluster.memory_tb_s * 1e12
    if not op.flops:
        return op.bytes * device.unfused / (bandwidth * device.memory) + device.launch_s * device.unfused
    peak = cluster.peak_tflops[format_of(op, compute)] * 1e12
    return (attention_s if "attention" in op.name else product_s)(op, peak, bandwidth, device)


def format_of(op: Op, compute: str) -> str:
    """The number format in which a product of these tensors is computed."""
    if op.dtype == "float32":
        return "tf32" if compute == "tf32" else "fp32"
    return compute if compute in ("fp8",) else PEAKS[op.dtype]


def total(ops: Iterable[tuple[Op, float]], cluster, device: Device, compute: str) -> float:
    """Seconds of all calls, one after another; `ops` are kinds of calls with how many there are."""
    return sum(count * seconds(op, cluster, device, compute) for op, count in ops)
