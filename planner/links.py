"""How long a collective takes: which link its group crosses, and the algorithm that NCCL uses there."""

import math
from dataclasses import dataclass

from planner.device import Device


@dataclass(frozen=True)
class Group:
    """The ranks of one axis, as they lie on the nodes."""

    axis: str
    size: int
    # How many of them share a node.
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes the group lies on."""
        return math.ceil(self.size / self.per_node)


def groups(parallel, devices_per_node: int) -> dict[str, Group]:
    """The group of each axis. Ranks are numbered tp fastest, then cp, dp and pp, and nodes are filled in that order."""
    p, found = parallel, {}
    for axis, size, stride in (
        ("tp", p.tp, 1),
        ("cp", p.cp, p.tp),
        ("dp", p.cp * p.dp, p.tp),
        ("pp", p.pp, p.tp * p.cp * p.dp),
        ("embedding", min(2, p.pp), p.tp * p.cp * p.dp * max(1, p.pp - 1)),
        ("all", p.tp * p.cp * p.dp * p.pp, 1),
        ("other", p.tp * p.cp * p.dp * p.pp, 1),
    ):
        found[axis] = Group(axis, size, max(1, min(size, devices_per_node // stride)))
    return found


def seconds(name: str, size: int, group: Group, cluster, device: Device) -> float:
    """Seconds of one collective of `size` bytes (of the whole tensor) over `group`.

    Rings (all-gather and reduce-scatter move (n-1)/n of the tensor over each link, all-reduce twice that). Inside a
    node the links are NVLink's. Between nodes each of the group's devices in a node brings its own network link.
    """
    n, inside = group.size, cluster.nvlink_gb_s * 1e9 * device.nvlink
    if n == 1:
        return 0.0
    if group.nodes == 1:
        bandwidth, hops, hop = inside, n - 1, device.hop_s
    else:
        outside = cluster.network_gb_s * 1e9 * device.network * group.per_node
        bandwidth, hops, hop = min(inside, outside), 2 * math.ceil(math.log2(group.nodes)), device.network_hop_s
    if name in ("send", "recv"):
        link = inside if group.nodes == 1 or group.per_node > 1 else cluster.network_gb_s * 1e9 * device.network
        return size / link + hop
    share = (n - 1) / n * (2 if name == "all_reduce" else 1)
    latency = hop * hops * (2 if name == "all_reduce" else 1)
    if name == "broadcast":
        share = 1.0
    return share * size / bandwidth + latency


def sent_bytes(name: str, size: int, n: int) -> float:
    """Bytes that one rank of `n` sends for a collective of `size` bytes in a ring."""
    if name in ("send", "recv", "broadcast", "reduce"):
        return size if name != "recv" else 0
    return (n - 1) / n * size * (2 if name == "all_reduce" else 1)
