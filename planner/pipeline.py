"""One step of a pipeline, simulated: Megatron's 1F1B and interleaved schedules, with waiting and bubble."""

from dataclasses import dataclass

from megatron.core.pipeline_parallel.schedules import get_schedule_table


@dataclass(frozen=True)
class Event:
    """One forward or backward pass of a micro-batch through a model chunk, on one pipeline rank."""

    stage: int
    kind: str  # forward or backward
    chunk: int
    micro_batch: int
    start: float
    end: float


def order(stage: int, pp: int, vpp: int, m: int) -> list[tuple[str, int, int]]:
    """What a pipeline rank does, in order: (forward or backward, chunk, micro-batch)."""
    table = get_schedule_table(m, vpp, pp) if vpp > 1 else [(i, 0) for i in range(m)]
    forward = [("forward", chunk, i) for i, chunk in table]
    backward = [("backward", vpp - 1 - chunk, i) for i, chunk in table]
    warm = pp - stage - 1 if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp
    warm = min(warm, len(forward))
    steady = [op for pair in zip(forward[warm:], backward, strict=False) for op in pair]
    return forward[:warm] + steady + backward[len(forward) - warm :]


def simulate(
    pp: int, vpp: int, m: int, forward: list[list[float]], backward: list[list[float]], send_s: float
) -> tuple[float, list[Event]]:
    """Seconds from the first forward to the end of the last backward pass, and every event.

    Args:
        forward, backward: seconds by [stage][chunk].
        send_s: seconds of passing a tensor to the next stage. The plain schedule waits for it, the interleaved one
            sends while it computes.
    """
    orders = [order(stage, pp, vpp, m) for stage in range(pp)]
    at, clock = [0] * pp, [0.0] * pp
    done: dict[tuple, float] = {}
    events: list[Event] = []
    ready = list(range(pp))
    busy = send_s if vpp == 1 else 0.0
    while ready:
        moved = []
        for stage in ready:
            while at[stage] < len(orders[stage]):
                kind, chunk, i = orders[stage][at[stage]]
                needed = _needed(kind, stage, chunk, i, pp, vpp)
                if needed is not None and needed not in done:
                    break
                start = max(clock[stage], done[needed] + (0.0 if needed[1] == stage else send_s) if needed else 0.0)
                took = (forward if kind == "forward" else backward)[stage][chunk]
                end = start + took
                done[kind, stage, chunk, i] = end
                clock[stage] = end + (busy if pp > 1 else 0.0)
                events.append(Event(stage, kind, chunk, i, start, end))
                at[stage] += 1
                moved.append(stage)
        ready = sorted({s % pp for stage in moved for s in (stage - 1, stage + 1)})
    if any(n < len(o) for n, o in zip(at, orders, strict=True)):
        raise RuntimeError("the simulated pipeline stands still")  # an order that no pipeline can follow
    return max(e.end for e in events), events


def _needed(kind: str, stage: int, chunk: int, i: int, pp: int, vpp: int) -> tuple | None:
    """The event whose result a pass waits for."""
    if kind == "forward":
        if stage > 0:
            return "forward", stage - 1, chunk, i
        return ("forward", pp - 1, chunk - 1, i) if chunk > 0 else None
    if stage < pp - 1:
        return "backward", stage + 1, chunk, i
    return ("backward", 0, chunk + 1, i) if chunk < vpp - 1 else ("forward", stage, chunk, i)


def step_s(
    pp: int, vpp: int, m: int, forward: list[list[float]], backward: list[list[float]], send_s: float
) -> tuple[float, list[Event]]:
    """As `simulate`, for any number of micro-batches: after some rounds each further one takes the same time."""
    most = max(4 * pp, 8)
    if m <= 2 * most:
        return simulate(pp, vpp, m, forward, backward, send_s)
    group = pp if vpp > 1 else 1
    low = most // group * group + m % group
    (first, _), (second, events) = (
        simulate(pp, vpp, n, forward, backward, send_s) for n in (low, low + max(group, most // group * group))
    )
    step = max(group, most // group * group)
    return second + (m - low - step) / step * (second - first), events
