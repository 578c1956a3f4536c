"""Do all layouts train the same thing? `python -m parallel.parity [layout ...] [key=value ...]`, see --help.

Each layout trains from the same seed on the same global batches as the reference, one process, and its losses, gradient
norms and final weights are compared. The exit code is 1 when one of them is further off than rounding explains.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from parallel import compose, launch, overrides, parity_points
from parallel.frozen import load
from parallel.parity_points import CASES, FOUND, PLAN, Point
from parallel.parity_table import head, markdown, row
from parallel.refused import Refused
from tracking.console import duration

TRAIN = Path(__file__).resolve().parent.parent / "train.py"


def main(argv: list[str], entry: list[str] | None = None) -> int:
    """Run the protocol; the exit code. `entry` is the command of a rank, to which the folder is added."""
    args = _parser().parse_intermixed_args(argv)
    began = time.monotonic()
    root = Path(args.folder or tempfile.mkdtemp(prefix="parity_")).resolve()
    try:
        points = _plan(args, root)
    except Refused as refusal:
        return compose.tell(refusal.sentences)
    print(head(), *(row(point) for point in points if point.problems), sep="\n", flush=True)
    try:
        points = run(points, root, entry)
    except KeyboardInterrupt:
        return 130
    if args.markdown:
        Path(args.markdown).write_text(markdown(points))
    code = _end(points, root, time.monotonic() - began)
    if code == 0 and not args.folder:
        shutil.rmtree(root)
    return code


def run(points: list[Point], root: Path, entry: list[str] | None = None) -> list[Point]:
    """Train and compare all points, in as few processes as possible; the points with what was found."""
    entry = entry or [sys.executable, "-u", str(TRAIN), "--parity"]
    done = {point.folder: point for point in points if point.problems}
    while due := [point for point in points if point.folder not in done]:
        together = [point for point in due if point.environment == due[0].environment]
        largest = max(together, key=lambda point: point.world_size)
        (root / PLAN).write_text(json.dumps([asdict(point) for point in together]))
        cause = None
        try:
            launch.run(root, load(root / largest.folder), [*entry, str(root)])
        except launch.JobFailed as failure:
            cause = str(failure)
        lines = (root / FOUND).read_text().splitlines() if (root / FOUND).exists() else []
        done |= {found["folder"]: Point(**found) for found in map(json.loads, lines)}
        if cause:
            guilty = next((point for point in together if point.folder not in done), together[-1])
            for point in due:
                if guilty.folder in (point.folder, point.reference):
                    point.failed = [cause if point is guilty else f"its reference: {cause}"]
                    done[point.folder] = point
                    print(row(point), flush=True)
    return [done[point.folder] for point in points]


def _plan(args: argparse.Namespace, root: Path) -> list[Point]:
    words, layouts, precisions = [], [], args.precision.split(",")
    for word in compose.quote_choices(args.words):
        key, equals, value = word.partition("=")
        if key == "precision":
            precisions = value.split(",")
        elif key == "parallel" or not equals:
            layouts += (value or key).split(",")
        else:
            words.append(word)
    cases = list(CASES) if args.case == "all" else args.case.split(",") if args.case else []
    found = overrides.problems(words, multirun=False)
    for kind, asked, known in (
        ("layout", [*layouts, args.reference], parity_points.layouts()),
        ("case", cases, list(CASES)),
        ("precision", precisions, overrides.options()["precision"]),
    ):
        found += [f"{kind} {name} does not exist: there are {', '.join(known)}." for name in asked if name not in known]
    if root.exists() and any(root.iterdir()):
        found.append(f"{root} is not empty: name another folder with --folder.")
    if found:
        raise Refused(found)
    groups = parity_points.wanted(layouts, cases, precisions)
    points = list(parity_points.plan(root, groups, args.steps, words, args.reference))
    unusable = [point for point in points if point.is_reference and point.problems]
    if unusable:
        raise Refused([f"the reference {point.layout}: {line}" for point in unusable for line in point.problems])
    return points


def _end(points: list[Point], root: Path, seconds: float) -> int:
    compared = [point for point in points if not point.is_reference and not point.problems]
    failed = [point for point in compared if point.failed]
    print(f"\n{len(compared) - len(failed)} of {len(compared)} agree with their reference, {duration(seconds)}.")
    if failed:
        print(f"The first that does not left its metrics and logs in {root / failed[0].folder}")
    return 1 if failed or not compared else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parallel.parity", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="layout or key=value", help="layouts (all of conf/parallel) and "
                        "overrides as in train.py; those of parallel.* are not for the reference")  # fmt: skip
    parser.add_argument("--precision", default="fp32,bf16", help="formats to compare in (default: fp32,bf16)")
    parser.add_argument("--case", help=f"all, or some of {', '.join(CASES)} (default: base; without layouts, all of "
                        "them in the first format under layouts that exercise every axis)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--reference", default="single", help="layout that the others are compared with")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables in Markdown")
    parser.add_argument("--folder", help="keep the runs there; else they stay only when one fails")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
