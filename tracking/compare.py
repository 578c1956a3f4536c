"""Compare runs without W&B: python -m tracking.compare FOLDER... [--by GROUP] [--metric NAME] [--out FOLDER].

Prints the table and writes compare.csv and compare.html.
"""

import argparse
import csv
import os
import sys
from pathlib import Path

from tracking import compare_page, result, whole
from tracking.console import short
from tracking.runs import SWEEP_FILE, Run, find, labels, value_of
from tracking.table import arrange, measure, table

CSV_FILE, PAGE_FILE = "compare.csv", "compare.html"
# Of result.json, in the order of its description; what is no number or short text has no place in a CSV.
FIELDS = (
    "steps tokens loss_final loss_best val_loss_start val_loss_final val_loss_best tokens_per_s step_s mfu peak_tflops "
    "peak_gib clip_fraction skipped_steps first_nonfinite_step world_size parameters device git_commit started ended"
).split()


def write(folder: str | Path) -> Path:
    """Writes compare.csv and compare.html into a sweep's folder, from what its points have left so far.

    Returns the path of the page; raises OSError when the folder cannot be read or written to.
    """
    return write_runs(find([folder]), Path(folder), _title([folder]))


def write_runs(runs: list[Run], place: Path, title: str, by: str | None = None, metric: str | None = None) -> Path:
    """Writes the comparison of `runs` into the folder `place`, in the order of tracking.table.

    Raises OSError when it cannot be written, ValueError for a `by` or a `metric` that no run has.
    """
    ordered = arrange(runs, by, metric, measure(runs, metric) if metric else None)
    page = compare_page.html(title, ordered, place, by)
    place.mkdir(parents=True, exist_ok=True)
    _write_csv(place / CSV_FILE, ordered)
    path = place / PAGE_FILE
    whole.write(path, page.encode())  # it may be looked at while a sweep writes it anew
    return path


def _title(folders: list[str | Path]) -> str:
    names = [Path(folder).resolve().name for folder in folders]
    if len(names) > 3:
        return f"{len(names)} folders"
    return ("Sweep " if (Path(folders[0]) / SWEEP_FILE).exists() else "") + " and ".join(names)


def _write_csv(path: Path, runs: list[Run]) -> None:
    """One line a run: what differs, how it ended, every number of result.json; NaN as NaN, unknown empty."""
    names = labels(runs)
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["number", *names, "status", "cause", "problem", *FIELDS, "config_hash", "folder"])
        for run in runs:
            about = [run.number, *(value_of(run, name) for name in names), run.status, run.cause, run.problem]
            fields = [result.plain(run.result.get(name)) for name in FIELDS]
            lines.writerow([*about, *fields, run.config_hash, os.path.relpath(run.folder, path.parent)])


def main(argv: list[str]) -> int:
    """The command line; 1 when there is nothing to compare or it cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m tracking.compare", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a sweep, runs, or folders above them")
    parser.add_argument("--by", help="group the lines and colour the curves by a group or key: precision, optimizer.lr")
    parser.add_argument("--metric", help="best first: perf/tokens_per_s, val/loss, or any other metric")
    parser.add_argument("--out", type=Path, help="where to write; otherwise the FOLDER, or for several the current one")
    args = parser.parse_args(argv)
    place = args.out or (Path(args.folders[0]) if len(args.folders) == 1 else Path())
    try:
        runs = find(args.folders)
        if not runs:
            print(f"There is no run in {', '.join(args.folders)}.", file=sys.stderr)
            return 1
        print(table(runs, args.by, args.metric))
        page = write_runs(runs, place, _title(args.folders), args.by, args.metric)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\nTable as CSV: {short(place / CSV_FILE)}\nPage, to open in a browser: {short(page)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
