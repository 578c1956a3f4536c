"""Fit the constants marked `estimate` in planner/device.py on published rows, each source with the same weight."""

import math
import statistics

from planner import device as devices
from planner import published

# Constant, and the values it is tried at: shares of a sheet figure, times, GiB.
GRID = {
    "attention": (0.3, 0.4, 0.5, 0.6, 0.7),
    "attention_backward": (0.3, 0.4, 0.5, 0.6),
    "memory": (0.7, 0.8, 0.9),
    "unfused": (0.25, 0.4, 0.55, 0.7, 0.85, 1.0),
    "network": (0.3, 0.45, 0.6, 0.8),
    "inner_extra": (0, 64, 128, 256, 512),
    "overlap_loss": (0.0, 0.1, 0.2, 0.35, 0.5),
    "dispatch_s": (4e-6, 8e-6, 12e-6, 18e-6, 25e-6),
    "launch_s": (2e-6, 4e-6, 8e-6),
}
MEMORY_GRID = {"context_gib": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), "fragmentation": (1.0, 1.04, 1.08, 1.12, 1.2)}
TYPES = ("A100", "H100")


def device(case, constants: dict[str, dict[str, float]]) -> devices.Device:
    """The constants of a case's device with fitted ones in place."""
    found = devices.of(case.cfg.cluster)
    return devices.with_constants(found, **constants.get(found.name, {}))


def constants(cases: list, rounds: int = 2) -> dict[str, dict[str, float]]:
    """Best constants of each device type, one after another."""
    found: dict[str, dict[str, float]] = {}
    for name in TYPES:
        here = [case for case in cases if devices.of(case.cfg.cluster).name == name]
        if not here:
            continue
        values = found[name] = {}
        for _ in range(rounds):
            for key, tries in GRID.items():
                values[key] = min(tries, key=lambda t, key=key: _speed(here, values | {key: t}))
        for key, tries in MEMORY_GRID.items():
            values[key] = min(tries, key=lambda t, key=key: _memory(here, values | {key: t}))
    return found


def _speed(cases: list, values: dict[str, float]) -> float:
    """Mean over sources of the mean absolute logarithm of predicted over published."""
    by_source: dict[str, list[float]] = {}
    for case in cases:
        if case.row.tokens_per_s_per_device:
            planned = case.plan(devices.with_constants(devices.of(case.cfg.cluster), **values))
            off = abs(math.log(planned.tokens_per_s_per_device / case.row.tokens_per_s_per_device))
            by_source.setdefault(case.row.source, []).append(off)
    return statistics.mean(statistics.mean(part) for part in by_source.values()) if by_source else 0.0


def _memory(cases: list, values: dict[str, float]) -> float:
    """Share of rows of which it is said wrongly whether they fit, each source weighed alike."""
    by_source: dict[str, list[bool]] = {"none": [False]}
    for case in (case for case in cases if case.row.source in published.MEMORY):
        planned = case.plan(devices.with_constants(devices.of(case.cfg.cluster), **values))
        by_source.setdefault(case.row.source, []).append(planned.fits == case.row.oom)
    return statistics.mean(statistics.mean(part) for part in by_source.values())
