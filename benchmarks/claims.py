"""Put the claims about training large models to the test: run their experiments, write what was found.

    python -m benchmarks.claims [claim ...] [--folder FOLDER] [override ...]

Each claim is a sweep, experiment=claim_*, kept in FOLDER (runs/claims); started again, only what is missing is run.
The table goes to benchmarks/results/claims.md and .json; that of some claims, or with overrides (train.steps=20, to try
it out; kept in runs/claims_tried), goes to FOLDER.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.claims_found import CLAIMS, Claim
from benchmarks.setting import ROOT
from tracking import result, runs
from tracking.console import duration

HEAD = "| claim | given | found | published | verdict |\n|---|---|---|---|---|\n"
AT_ONCE = 2


def main(argv: list[str]) -> int:
    """Run and read the claims; 1 when one was not measured, 2 for a name that is none."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="claim or key=value", help="default: all claims as they are")
    parser.add_argument("--folder", type=Path, help="where the sweeps are kept")
    args = parser.parse_intermixed_args(argv)
    overrides, names = [w for w in args.words if "=" in w], [w for w in args.words if "=" not in w]
    if unknown := [name for name in names if not any(name == claim.experiment for claim in CLAIMS)]:
        known = ", ".join(claim.experiment for claim in CLAIMS)
        print(f"{unknown[0]} is no claim: take some of {known}.", file=sys.stderr)
        return 2
    wanted = [claim for claim in CLAIMS if not names or claim.experiment in names]
    # Apart, since points of other lengths in one folder would be read as one sweep.
    kept = args.folder or Path("runs/claims_tried" if overrides else "runs/claims")
    rows, complete, began = [], True, time.monotonic()
    for done, claim in enumerate(wanted, 1):
        print(f"\n{claim.experiment}: {claim.claim}", flush=True)
        folder = kept / claim.experiment
        code = sweep(claim, folder, overrides)
        if code not in (
            0,
            1,
        ):  # 1: a point failed, which is for the reader to judge; else nothing ran, or it was stopped
            print(f"{claim.experiment} was not run to its end (exit code {code}): see above.", file=sys.stderr)
            return code
        found, verdict, measured = read(claim, folder)
        complete = complete and measured
        rows.append({"experiment": claim.experiment, "claim": claim.claim, "given": claim.given, "found": found,
                     "published": claim.published, "verdict": verdict})  # fmt: skip
        print(
            f"{verdict}: {found}\n{done} of {len(wanted)} claims after {duration(time.monotonic() - began)}", flush=True
        )
    place = kept if args.words else ROOT / "benchmarks" / "results"
    write(place, rows)
    print(f"\nwritten to {place}/claims.md and claims.json; look at the curves with:\n"
          f"  python -m tracking.compare {kept}/{wanted[0].experiment}")  # fmt: skip
    return 0 if complete else 1


def sweep(claim: Claim, folder: Path, overrides: list[str]) -> int:
    """Run what of the claim's sweep is not finished; the exit code of train.py."""
    words = [f"experiment={claim.experiment}", f"hydra.sweep.dir={folder}", "resume=true"]
    at_once = 1 if "zero3" in claim.experiment else AT_ONCE  # two ranks fill two cores, and are timed
    command = [sys.executable, str(ROOT / "train.py"), "-m", *words, f"launch.parallel_points={at_once}", *overrides]
    return subprocess.run(command, check=False).returncode


def read(claim: Claim, folder: Path) -> tuple[str, str, bool]:
    """Figure, verdict, and whether they are measured: not where a point neither finished nor went NaN."""
    points = runs.find([folder]) if folder.is_dir() else []
    if not points:
        return "no run", "not measured", False
    bad = [run for run in points if run.status not in ("ok", "nan")]
    if bad:
        return f"{len(bad)} of {len(points)} points did not finish, first: {bad[0].cause}", "not measured", False
    return *claim.read(points), True


def write(folder: Path, rows: list[dict]) -> None:
    """The table, for people and for programs, with what made it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"| {r['claim']} (`{r['experiment']}`) | {r['given']} | {r['found']} | {r['published']} | {r['verdict']} |"
        for r in rows
    ]
    (folder / "claims.md").write_text(HEAD + "\n".join(lines) + "\n")
    made_by = {"versions": result.versions(), "git_commit": result.git_commit()}
    (folder / "claims.json").write_text(json.dumps({"claims": rows} | made_by, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
