"""Will it fit, how fast, how long: python -m planner [-m] [group=option ...] [key=value ...].

    python -m planner experiment=llama2_13b_tp4_pp2 cluster=a100_40g_x8
    python -m planner -m experiment=llama2_13b_tp4_pp2,llama2_13b_zero3 cluster=a100_80g_x8
    python -m planner --search model=llama2_13b precision=bf16 data=mock cluster=a100_80g_x8 train.global_batch=1024
      --search        every legal layout on the whole cluster, ranked; the best as overrides
      --explain       the arithmetic: constants, kernels, messages
      --trace FILE    the simulated step for chrome://tracing or ui.perfetto.dev
      --json          everything as JSON
      --price P       of one device for one hour: the cost of train.tokens

The overrides are train.py's. No GPU is needed and nothing is started: the program's own functions run as one rank of
each kind under fake tensors.
"""

import argparse
import json
import sys
from pathlib import Path

from parallel.compose import tell
from parallel.refused import Refused

REFUSED_HEADLINE = "Nothing was planned:"


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Flags, and the words that Hydra composes."""
    parser = argparse.ArgumentParser(
        prog="python -m planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="every combination of what commas separate")
    parser.add_argument("--search", action="store_true", help="rank every legal layout on the whole cluster")
    parser.add_argument("--explain", action="store_true", help="show the arithmetic")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the simulated step as a Chrome trace")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--price", type=float, help="of one device for one hour")
    flags, words = parser.parse_known_args(argv)
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        parser.error(f"{unknown[0]} is no flag of the planner")
    return flags, words


def searched(cfg, words: list[str], flags: argparse.Namespace) -> int:
    """Search and print; the exit code: 1 when no layout fits."""
    from planner import report, search

    if cfg.cluster.devices_per_node is None:
        return tell(["a search needs a cluster: choose cluster=..., see conf/cluster/."], REFUSED_HEADLINE)
    found = search.search(cfg, words, progress=report.progress)
    if flags.json:
        print(json.dumps([{"words": f.layout.words(), "margin": f.margin, "speed": f.speed} for f in found], indent=1))
    else:
        print(report.ranking(cfg, found))
        if found:
            print("next: python -m planner " + " ".join([*words, *found[0].layout.words()]))
    return 0 if found else 1


def main(argv: list[str]) -> int:
    """Plan and print; the exit code: 0 when every point fits, 1 when one does not, 2 when one cannot exist."""
    flags, words = arguments(argv)
    from planner import points

    try:
        every = points.split(words) if flags.multirun else [words]
        cfgs = [points.config(point) for point in every]
    except Refused as refusal:
        return tell(refusal.sentences, REFUSED_HEADLINE)
    from parallel import quiet

    quiet.libraries()
    if flags.search:
        return searched(cfgs[0], words, flags)
    from planner import chrome, explain, plan, report

    plans = []
    for point, cfg in zip(every, cfgs, strict=True):
        try:
            found = plan.of(cfg, price=flags.price, name=" ".join(point) if flags.multirun else "")
        except KeyError as unknown:
            device = unknown.args[0]
            return tell(
                [f"nothing is known of the device {device}: planner/device.py lists those that are."], REFUSED_HEADLINE
            )
        plans.append(found)
        if not flags.json:
            print(report.text(found), end="\n\n")
        if flags.explain and found.step:
            print(explain.text(cfg, found), end="\n\n")
    if flags.json:
        print(json.dumps([one.plain() for one in plans] if flags.multirun else plans[0].plain(), indent=1))
    elif len(plans) > 1:
        print(report.table(plans))
    if flags.trace and plans[0].step:
        chrome.write(flags.trace, plans[0])
        print(f"{flags.trace} holds the simulated step: open it in ui.perfetto.dev.", file=sys.stderr)
    if not flags.json and len(plans) == 1:
        print(
            f"next: python {'train.py' if plans[0].fits else '-m planner'} {' '.join(words)}"
            + ("" if plans[0].fits else " parallel.recompute=full")
        )
    return 0 if all(one.fits for one in plans) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
