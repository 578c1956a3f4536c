"""What a device and its links really reach, as shares of the figures in conf/cluster: few constants with their sources.

The sheet figures (peak, bandwidths) stand in `conf/cluster/*.yaml`; here stands what of them a kernel or a collective
gets. Constants marked `measured` are measurements that someone published; those marked `estimate` are first estimates,
which `python -m planner.validate` fits on published training rows, each source judged by constants fitted without it.
"""

from dataclasses import dataclass, replace

# Best matrix product measured, as a share of the dense peak in its format: vendors' and others' microbenchmarks.
# A100 271 of 312, H100 795 of 989, H200 798 of 989, B200 1,745 of 2,250 TFLOP/s.
# All-reduce over the eight GPUs of a node: A100 235 of 300 GB/s one way, H200 368 of 450 (ring).


@dataclass(frozen=True)
class Device:
    """One type of device. Shares are of the sheet figure, times in seconds."""

    # Words of the device's name by which it is known.
    name: str
    # Streaming multiprocessors: output tiles of a matrix product are dealt out to them in waves.
    processors: int
    # Largest share of the dense peak that a matrix product reaches (measured, see above).
    product: float
    # Share of the peak that attention kernels reach, forwards and backwards (estimate).
    attention: float
    attention_backward: float
    # Share of the memory bandwidth that element-wise kernels reach (estimate).
    memory: float
    # Least time of a kernel, launch included (estimate).
    launch_s: float
    # Time the host takes to launch one kernel in eager mode (estimate; 5-10 µs is what PyTorch's own profiles show).
    dispatch_s: float
    # Share of NVLink's bandwidth that a collective reaches (measured, see above).
    nvlink: float
    # Share of the network's bandwidth that a collective reaches (estimate).
    network: float
    # Time of one hop of a collective inside a node and between nodes (NCCL's own figures for its rings: 1-7 µs).
    hop_s: float = 4e-6
    network_hop_s: float = 10e-6
    # A product's inner dimension costs as if it were this much longer: a tile's pipeline fills and drains (estimate).
    inner_extra: int = 128
    # Share of element-wise traffic left where kernels are fused; 1 for this program (estimate for other software).
    unfused: float = 1.0
    # Share of the smaller of communication and computation that overlap cannot hide: they share memory and processors.
    overlap_loss: float = 0.1
    # Bandwidth between device and host memory, one way, in GB/s: PCIe 4.0 or 5.0 with 16 lanes, four fifths of it.
    host_gb_s: float = 50.0
    # GiB taken before the first tensor: CUDA's context and kernels (0.5-1.6 GiB measured) and NCCL's buffers.
    context_gib: float = 2.0
    # What the allocator reserves over what is allocated at the peak (estimate).
    fragmentation: float = 1.04


DEVICES = (
    Device("A100", 108, 0.87, 0.60, 0.50, 0.80, 4e-6, 8e-6, 0.78, 0.80, host_gb_s=25.0),
    Device("H100", 132, 0.80, 0.45, 0.40, 0.80, 4e-6, 8e-6, 0.82, 0.80),
    Device("H200", 132, 0.80, 0.45, 0.40, 0.80, 4e-6, 8e-6, 0.82, 0.80),
    Device("B200", 148, 0.776, 0.45, 0.40, 0.80, 4e-6, 8e-6, 0.82, 0.80),
)
# One process of a CPU machine: no waves, and messages go through memory.
CPU = Device("CPU", 1, 0.9, 0.5, 0.4, 0.8, 10e-6, 10e-6, 0.5, 0.5, hop_s=50e-6, network_hop_s=200e-6, context_gib=0.5)


def of(cluster) -> Device:
    """The constants for the device of a cluster (conf.schema.Cluster).

    Raises:
        KeyError: with the name of a device that nothing is known of.
    """
    if cluster.device is None:
        return CPU
    for device in DEVICES:
        if device.name in cluster.device:
            return device
    raise KeyError(cluster.device)


def with_constants(device: Device, **values) -> Device:
    """The same device with some constants changed."""
    return replace(device, **values)
