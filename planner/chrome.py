"""The simulated step as a trace that chrome://tracing and Perfetto open."""

import json
from pathlib import Path

from planner.plan import Plan


def write(path: Path, plan: Plan) -> None:
    """Write the passes of every pipeline stage, then what is waited for once a step, and the optimizer."""
    events = [
        {
            "name": f"{event.kind} {event.micro_batch}",
            "cat": event.kind,
            "ph": "X",
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "pid": 0,
            "tid": event.stage,
            "args": {"chunk": event.chunk, "micro_batch": event.micro_batch},
        }
        for event in plan.step.events
    ]
    end = max(event.end for event in plan.step.events)
    stages = 1 + max(event.stage for event in plan.step.events)
    for name, seconds in (
        ("gradients and weights among dp", plan.step.exposed.get("dp", 0.0)),
        ("optimizer", plan.step.optimizer),
    ):
        for stage in range(stages):
            events.append(
                {"name": name, "cat": name, "ph": "X", "ts": end * 1e6, "dur": seconds * 1e6, "pid": 0, "tid": stage}
            )
        end += seconds
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        for stage in range(stages)
    ]
    path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))
