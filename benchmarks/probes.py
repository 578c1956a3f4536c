"""What numeric probes cost: in the steps that they measure, spread over `probe.every`, and where they are off.

    python -m benchmarks.probes [steps=60] [override ...]

train.py runs one process with every second step probed, so that probed and other steps alternate on the same machine
in the same state; the ratio of each probed step to the one before it is taken, and its median and quartiles are printed
and written to benchmarks/results/probes.json. Where probes are off, what is left of them is three calls a step that
return at once; these are timed by themselves, since a run is not steady enough to show them.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

from benchmarks.setting import ROOT, keep

WARM_UP = 6
EVERY = 50


def main(words: list[str]) -> None:
    """Run, print, write."""
    steps = next((int(word.partition("=")[2]) for word in words if word.startswith("steps=")), 60) + WARM_UP
    own = [word for word in words if not word.startswith("steps=")]
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["parallel=single", "precision=bf16", "tracking.mode=disabled", "train.sample_length=0", *own]
        overrides += [
            "probe.every=2",
            f"train.steps={steps}",
            f"train.eval_every={steps}",
            f"hydra.run.dir={folder}/run",
        ]
        subprocess.run([sys.executable, str(ROOT / "train.py"), *overrides], check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = {line["step"]: line["perf/step_s"] for line in lines if "train/loss" in line}
    plain = [seconds[step - 1] for step in range(WARM_UP + 2, steps + 1, 2)]
    probed = [seconds[step] for step in range(WARM_UP + 2, steps + 1, 2)]
    ratios = [a / b - 1 for a, b in zip(probed, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    report(overrides, len(ratios), statistics.median(plain), (low, middle, high))


def off_s() -> float:
    """Seconds that the three calls of a step take with probes off."""
    from omegaconf import OmegaConf

    from parallel import compose
    from precision.probes import Probe

    cfg = OmegaConf.to_object(compose.check(compose.compose(["parallel=single", "launch.device=cpu"])[0]))
    probe = Probe(cfg, [], None)

    def calls():
        probe.begin(1)
        probe.gradients(1.0)
        probe.end(updated=True)

    return min(timeit.repeat(calls, number=10_000, repeat=5)) / 10_000


def report(overrides: list[str], pairs: int, step_s: float, quartiles: tuple[float, float, float]) -> None:
    """Print the figures and write them with configuration and versions."""

    low, middle, high = quartiles
    off = off_s()
    found = {
        "pairs": pairs,
        "step_s": step_s,
        "probed_step_more": middle,
        "probed_step_more_quartiles": [low, high],
        f"every_{EVERY}_steps": middle / EVERY,
        "off_s_per_step": off,
        "off": off / step_s,
        "overrides": overrides,
    }
    print(f"step             {step_s * 1e3:8.2f} ms (median of {pairs})")
    print(f"probed step      {middle:8.1%} more (quartiles {low:.1%} to {high:.1%})")
    print(f"every {EVERY} steps   {middle / EVERY:8.2%}")
    print(f"off              {off / step_s:8.5%} ({off * 1e6:.2f} us)")
    keep("probes", **found)


if __name__ == "__main__":
    main(sys.argv[1:])
