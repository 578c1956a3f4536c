"""How far is the planner from what others measured? python -m planner.validate [source=NAME ...] [profiles=FOLDER]

Plans every row of planner/published/throughput.csv and prints, by source, the error of tokens/s and of memory, how many
out-of-memory rows are called right, and how often the faster of two runs that differ only in layout is named. Constants
marked `estimate` in planner/device.py are fitted anew without the source that is judged, so that no figure is a fit to
itself. The dry runs take most of the time; `profiles=` keeps them in a folder for the next time with the same code.
They are pickles: name a folder that nobody else writes to.
"""

import hashlib
import json
import pickle
import statistics
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from planner import device as devices
from planner import fit, plan, published
from tracking import result

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "published.json"


@dataclass
class Case:
    """A published row with the dry runs of its stages."""

    row: published.Row
    cfg: object
    profiles: list

    def plan(self, device: devices.Device | None = None) -> plan.Plan:
        """The plan with some constants."""
        return plan.combine(self.cfg, self.profiles, device or devices.of(self.cfg.cluster))


def cases(rows: list[published.Row], folder: Path | None) -> list[Case]:
    """Dry runs of all rows, those that cannot be planned left out with a line that says why."""
    from parallel.refused import Refused
    from planner import points

    found = []
    for i, row in enumerate(rows):
        if sys.stderr.isatty():
            print(f"\rdry run {i + 1} of {len(rows)}", end="", file=sys.stderr, flush=True)
        try:
            cfg = points.config(list(row.words))
        except Refused as refusal:
            print(f"left out {row.id}: {refusal.sentences[0]}", file=sys.stderr)
            continue
        found.append(Case(row, cfg, _profiles(cfg, row, folder)))
    return found


def _profiles(cfg, row: published.Row, folder: Path | None) -> list:
    words = [word for word in row.words if not word.startswith("cluster")]
    file = folder and folder / (hashlib.sha256(f"{result.git_commit()} {words}".encode()).hexdigest()[:16] + ".pickle")
    if file and file.exists():
        return pickle.loads(file.read_bytes())
    # Of most sources only the speed is judged: they list neither memory nor failed runs.
    found = plan.profiles(cfg, ends=True, speed_only=row.source not in published.MEMORY)
    if file:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(found))
    return found


def judge(found: list[Case], device_of) -> dict:
    """Errors of these cases with the constants that `device_of(case)` gives."""
    plans = [(case.row, case.plan(device_of(case))) for case in found]
    speed = [p.tokens_per_s_per_device / r.tokens_per_s_per_device - 1 for r, p in plans if not r.oom]
    memory = [(p.has - p.margin) / plan.GIB / r.peak_gib - 1 for r, p in plans if r.peak_gib]
    sized = [(r, p) for r, p in plans if r.source in published.MEMORY]
    called = [p.fits != r.oom for r, p in sized]
    missed, alarms = sum(r.oom and p.fits for r, p in sized), sum(not r.oom and not p.fits for r, p in sized)
    right = total = 0
    for (r, p), (other, q) in combinations([(r, p) for r, p in plans if not r.oom], 2):
        apart = r.tokens_per_s_per_device / other.tokens_per_s_per_device
        # Two figures nearer than a hundredth are a tie.
        if r.question == other.question and abs(apart - 1) > 0.01:
            total += 1
            right += (p.tokens_per_s_per_device > q.tokens_per_s_per_device) == (apart > 1)
    return {
        "rows": len(plans), "speed": speed, "memory": memory, "called": called, "missed": missed, "alarms": alarms,
        "pairs": total, "pairs_right": right,
    }  # fmt: skip


def quantile(values: list[float], share: float) -> float:
    """The `share` quantile of absolute values."""
    ordered = sorted(abs(v) for v in values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def line(name: str, found: dict) -> str:
    """One row of the table."""
    speed, memory = found["speed"], found["memory"]
    fast = (
        f"{quantile(speed, 0.5):8.1%}{quantile(speed, 0.9):8.1%}{statistics.median(speed):+9.1%}" if speed else " " * 25
    )
    size = f"{quantile(memory, 0.5):8.1%}{statistics.median(memory):+9.1%}" if memory else " " * 17
    called = f"{sum(found['called']):5}/{len(found['called']):<4}{found['missed']:4}{found['alarms']:4}"
    pairs = f"{found['pairs_right']:6}/{found['pairs']}" if found["pairs"] else ""
    return f"{name:16}{found['rows']:5}  {fast}  {size}  {called}  {pairs}"


def merged(parts: list[dict]) -> dict:
    """All sources together."""
    return {key: sum((p[key] for p in parts), start=[] if isinstance(parts[0][key], list) else 0) for key in parts[0]}


def main(words: list[str]) -> None:
    """Plan, judge, print, write."""
    from parallel import quiet

    quiet.libraries()
    sources = [word.removeprefix("source=") for word in words if word.startswith("source=")] or None
    folder = next((Path(word.removeprefix("profiles=")) for word in words if word.startswith("profiles=")), None)
    found = cases(published.rows(sources), folder)
    by_source = {
        source: [c for c in found if c.row.source == source] for source in sorted({c.row.source for c in found})
    }
    head = (
        f"{'':16} rows  tokens/s off     90 %     bias  memory off    bias  fits right, OOM missed, false alarms; pairs"
    )
    print(head)
    as_shipped = {source: judge(part, lambda case: None) for source, part in by_source.items()}
    for source, part in as_shipped.items():
        print(line(source, part))
    print(line("all, as shipped", merged(list(as_shipped.values()))))
    left_out = {}
    for source, part in by_source.items():
        constants = fit.constants([case for case in found if case.row.source != source])
        left_out[source] = judge(part, lambda case, c=constants: fit.device(case, c))
        print(line(f"without {source}"[:16], left_out[source]))
    if len(by_source) > 1:
        print(line("all, left out", merged(list(left_out.values()))))
    if sources is None:
        RESULT.write_text(json.dumps({"as_shipped": as_shipped, "left_out": left_out}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
