"""The arithmetic behind a plan: constants with their sources, every kind of kernel and message with its seconds."""

from planner import device as devices
from planner import kernel_time, links, profile
from planner.plan import GIB, Plan


def text(cfg, plan: Plan) -> str:
    """Constants, kernels and messages of one micro-batch on the first stage, and how the sums are made."""
    device = devices.of(cfg.cluster)
    found = profile.of(cfg, 0)
    groups = links.groups(cfg.parallel, cfg.cluster.devices_per_node)
    rows = [f"Constants ({device.name}; planner/device.py says where each is from): {_constants(device)}"]
    needed = plan.stages[0]
    state = sum(needed.state.values())
    rows.append(
        f"Memory of stage 0: {state / GIB:.2f} state + {(needed.peak - state) / GIB:.2f} working × "
        f"{device.fragmentation} + {device.context_gib} context = {needed.needed / GIB:.2f} GiB"
    )
    for kind in ("forward", "backward"):
        for chunk in range(cfg.parallel.vpp):
            part = found.typical(kind, chunk)
            rows.append(f"{kind} pass of one micro-batch through chunk {chunk}:")
            rows += _kernels(part, cfg, device) + _messages(part, groups, cfg, device)
    rows.append("optimizer:")
    rows += _kernels(found.parts["optimizer"], cfg, device)
    rows.append(
        f"A step: {plan.micro_batches} micro-batches through the simulated pipeline, then gradients, weights and "
        f"optimizer, {plan.step.total:.4g} s; tokens/s a device = {plan.tokens_per_step:,} / {plan.step.total:.4g} / "
        f"{plan.devices}"
    )
    return "\n".join(rows)


def _constants(device: devices.Device) -> str:
    return ", ".join(f"{name}={value}" for name, value in vars(device).items() if name != "name")


def _kernels(part: profile.Part, cfg, device: devices.Device) -> list[str]:
    by_name: dict[str, list[float]] = {}
    for op, count in part.ops.items():
        seconds = count * kernel_time.seconds(op, cfg.cluster, device, cfg.precision.compute)
        label = f"{op.name} {'×'.join(map(str, op.shape))} {op.dtype}" if op.flops else f"{op.name}"
        entry = by_name.setdefault(label, [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((count, op.flops * count, op.bytes * count, seconds)):
            entry[i] += value
    rows = []
    for label, (count, flops, size, seconds) in sorted(by_name.items(), key=lambda item: -item[1][3])[:12]:
        rate = f"{flops / seconds / 1e12:6.0f} TFLOP/s" if flops else f"{size / seconds / 1e9:6.0f} GB/s   "
        rows.append(f"  {seconds * 1e3:10.3f} ms  {rate}  {count:6.0f} × {label}")
    return rows


def _messages(part: profile.Part, groups, cfg, device: devices.Device) -> list[str]:
    rows = []
    for (axis, name), (calls, size) in part.sent.items():
        group = groups[axis]
        seconds = calls * links.seconds(name, size / calls, group, cfg.cluster, device)
        where = "inside a node" if group.nodes == 1 else f"over {group.nodes} nodes"
        rows.append(
            f"  {seconds * 1e3:10.3f} ms  {size / seconds / 1e9:6.0f} GB/s     {calls:6.0f} × {name} of "
            f"{size / calls / 1e6:.1f} MB over {axis} ({group.size} ranks {where})"
        )
    return rows
