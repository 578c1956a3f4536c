"""A W&B workspace for a sweep: python -m tracking.dashboard SWEEP_FOLDER [--entity ENTITY] [--project PROJECT]

Curves of all points, the same averaged by every choice and key that differs between them, bars of throughput and
memory, and what separates the runs. It shows the points that W&B's server has, also those that come later; called again
it brings the same workspace up to date. Needs the extra `dashboard`.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from tracking import result, runs
from tracking.mode import key, server
from tracking.wandb_run import FILE as WANDB_FILE

FILE = "dashboard.json"  # in the sweep's folder: the workspace's address
CURVES = {"train/loss": False, "val/loss": False, "grad/norm": True, "train/lr": False}  # name: logarithmic
# In the order of result.json, which W&B has under result/.
BARS = {
    "tokens_per_s": "Tokens per second",
    "step_s": "Seconds per step",
    "mfu": "MFU",
    "peak_gib": "Peak memory (GiB)",
    "clip_fraction": "Share of clipped updates",
    "val_loss_best": "Best validation loss (nats)",
}
COLUMNS = ("status", "cause", "val_loss_best", "tokens_per_s", "mfu", "peak_gib", "clip_fraction", "skipped_steps")


class NoDashboard(Exception):
    """No workspace can be made; the message is a sentence with what to do."""


def write(folder: str | Path, entity: str | None = None, project: str | None = None) -> str:
    """Makes or renews the workspace of a sweep's folder; its URL. Raises NoDashboard."""
    folder = Path(folder).resolve()
    try:
        points = [run for run in runs.find([folder]) if run.cfg is not None]
    except FileNotFoundError as error:
        raise NoDashboard(f"{error}.") from error
    if not points:
        raise NoDashboard(f"{folder} holds no runs.")
    if not key():
        raise NoDashboard(f"There is no API key for {server()}: run `wandb login` or set WANDB_API_KEY.")
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise NoDashboard(f"{error}: install the extra with pip install -e .[dashboard].") from error
    about = [known for run in points if (known := result.load(run.folder, WANDB_FILE))]
    project = project or next((known["project"] for known in about), points[0].cfg["tracking"]["project"])
    content = {
        "name": f"Sweep {folder.name}",
        "sections": _sections(ws, points),
        "settings": ws.WorkspaceSettings(x_axis="tokens", max_runs=max(len(points), 10)),
        "runset_settings": ws.RunsetSettings(
            filters=[ws.Metric("Group") == folder.name],
            pinned_columns=["run:state", *(f"summary:result/{name}" for name in COLUMNS)],
        ),
    }
    url = result.load(folder, FILE).get("url")
    with _answering():
        entity = entity or _entity(about) or wandb.Api().default_entity
    if not entity:
        raise NoDashboard(f"{server()} names no default entity: give one with --entity.")
    with _answering():
        space = (url and _earlier(ws, url, entity, project)) or ws.Workspace(entity=entity, project=project)
        for name, value in content.items():
            setattr(space, name, value)
        space.save()
        url = space.url
    result.write(folder, FILE, url=url)
    return url


def unsent(folder: str | Path) -> list[Path]:
    """W&B's folders of points that are on this machine only."""
    return [
        offline
        for offline in sorted((Path(folder) / "wandb").glob("offline-run-*"))
        if not list(offline.glob("*.synced"))
    ]


@contextlib.contextmanager
def _answering():
    """Turns whatever a request to W&B's server raises into NoDashboard."""
    try:
        yield
    except Exception as error:  # what a refused request raises is no part of W&B's public names
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise NoDashboard(f"W&B at {server()} does not take the workspace: {words}") from error


def _entity(about: list[dict]) -> str | None:
    """Whose the runs are: in the address of one that was online, https://HOST/ENTITY/PROJECT/runs/ID."""
    return next((known["url"].split("/")[-4] for known in about if known.get("url")), None)


def _earlier(ws, url: str, entity: str, project: str):
    """The workspace that an earlier call made, None where it is gone or belongs to another project."""
    try:
        space = ws.Workspace.from_url(url)
    except ValueError as error:
        if "not found" not in str(error):
            raise
        return None  # somebody has removed it
    return space if (space.entity, space.project) == (entity, project) else None


def _sections(ws, points: list[runs.Run]) -> list:
    import wandb_workspaces.reports.v2 as wr

    shown = max(len(points), 10)
    names = runs.labels(points)
    axes = {name: wr.Config(f"choices.{name}" if name in points[0].choices else name) for name in names}

    def curves(**options) -> list:
        return [
            wr.LinePlot(title=name, x="tokens", y=[name], log_y=log, max_runs_to_show=shown, **options)
            for name, log in CURVES.items()
        ]

    def bars(**options) -> list:
        return [
            wr.BarPlot(
                title=title, metrics=[f"result/{name}"], max_runs_to_show=shown, max_bars_to_show=shown, **options
            )
            for name, title in BARS.items()
        ]

    def section(name: str, panels: list, columns: int = 2) -> "ws.Section":
        layout = ws.SectionLayoutSettings(columns=columns, rows=-(-len(panels) // columns))
        return ws.Section(name=name, panels=panels, is_open=True, layout_settings=layout)

    found = [section("Curves", curves()), section("Throughput and memory", bars(), columns=3)]
    for name, axis in axes.items():
        grouped = {"groupby": axis, "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
        loss, _, norm, _ = curves(**grouped)
        speed, _, _, memory, *_ = bars(**grouped)
        found.append(section(f"By {name}", [loss, norm, speed, memory]))
    columns = [wr.ParallelCoordinatesPlotColumn(metric=axis, display_name=name) for name, axis in axes.items()]
    columns += [
        wr.ParallelCoordinatesPlotColumn(metric=wr.SummaryMetric(f"result/{name}"), display_name=BARS[name])
        for name in ("tokens_per_s", "peak_gib", "val_loss_best")
    ]
    differences = [wr.ParallelCoordinatesPlot(columns=columns), wr.RunComparer(diff_only="split")]
    return [*found, section("What differs", differences, columns=1)]


def main(argv: list[str]) -> int:
    """The command line; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tracking.dashboard", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", help="folder of a sweep")
    parser.add_argument("--entity", help="user or team on W&B; by default the one whose the runs are")
    parser.add_argument("--project", help="project on W&B; by default that of the runs")
    given = parser.parse_args(argv)
    try:
        print(write(given.sweep, given.entity, given.project))
    except NoDashboard as refusal:
        print(refusal, file=sys.stderr)
        return 1
    if waiting := unsent(given.sweep):
        words = " ".join(str(folder) for folder in waiting)
        print(
            f"{len(waiting)} of its points are on this machine only and not in the workspace yet:\n  wandb sync {words}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
