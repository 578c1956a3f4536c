"""The report page: one file, no network, and every run gets one, whatever became of it."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tracked
from tracked_run import FACTS, raw

from tracking import page, report, result
from tracking.history import History
from tracking.metrics import Meter

REPO = Path(__file__).resolve().parent.parent


def make_run(run_dir: Path, steps: int = 50, finished: bool = True, **changed) -> Path:
    """A run folder as a run of `steps` steps leaves it; `changed` are raw facts of every step."""
    point = tracked.point(run_dir, "clip=0.1")
    meter, lines, summary = Meter(point.cfg, 1, 1e6, 2.0), History(run_dir), result.Summary()
    for step in range(steps + 1):
        metrics = {"tokens": 0, "val/loss": 5.5} if step == 0 else meter.step(raw(step, 0.1) | changed)
        lines.add(step, metrics)
        summary.add(step, metrics)
    lines.add(steps, {"tokens": steps * 8192, "val/loss": 2.25})
    facts = result.facts(point, FACTS)
    result.write(run_dir, result.FACTS_FILE, **facts)
    if finished:
        sample = {"prompt": "def ", "text": "f():</pre><script>alert(1)</script>"}
        result.write(run_dir, status="ok", **summary.fields(), **facts, sample=sample, verdict="It computes correctly.")
    return run_dir


def charts_of(html: str) -> dict[str, dict]:
    """The charts of a page, by title."""
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return {chart["title"]: chart for chart in json.loads(data.group(1))}


def test_a_page_of_a_thousand_steps_is_small_and_needs_no_network(tmp_path):
    html = report.write(make_run(tmp_path / "run", steps=1000)).read_text()
    assert len(html.encode()) < 300_000
    assert not re.search(r'(?:src|href)="(?!data:)|@import|url\(|fetch\(|XMLHttpRequest|import\(', html)
    assert "Copyright (c) 2022 Leon Sorokin" in html or "The MIT License" in html


def test_the_page_shows_what_the_run_was_and_became(tmp_path):
    html = report.write(make_run(tmp_path / "run")).read_text()
    for part in (
        "tiny · single · fp32 · adamw · clip 0.1",
        '<span class="status ok">ok</span>',
        "It computes correctly.",
        "python train.py parallel=tp2",
        "dense BF16 peak of Abacus 9",
        "max_norm",
        "fingerprint abc123",
    ):
        assert part in html
    charts = charts_of(html)
    assert list(charts) == ["Loss", "Gradient norm before clipping", "Learning rate", "Tokens per second"]
    training, validation = (series["values"] for series in charts["Loss"]["series"])
    assert training[0] is None and training[1] == 5 and training[-1] == 1.08
    assert [value for value in validation if value is not None] == [5.5, 2.25]
    assert set(charts["Gradient norm before clipping"]["series"][1]["values"]) == {0.1}
    assert len(charts["Loss"]["x"]) == len(training) == len(validation) == 51


def test_what_a_model_writes_cannot_become_part_of_the_page(tmp_path):
    html = report.write(make_run(tmp_path / "run")).read_text()
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html
    series = [{"label": "</script><b>", "values": [1.0]}]
    charts = [page.chart("</h2><b>", [1], series)]
    page_of_labels = page.document("</title><b>", page.places(charts), charts, ("charts.js",))
    assert "<b>" not in page_of_labels.partition("</style>")[2].partition("var uPlot")[0]


def test_a_run_that_was_killed_has_a_page_too(tmp_path):
    html = report.write(make_run(tmp_path / "run", finished=False)).read_text()
    assert '<span class="status unfinished">unfinished</span>' in html and "1.080" in html and "1,234,567" in html


def test_a_run_that_never_began_has_a_page_too(tmp_path):
    tracked.point(tmp_path / "run")
    result.complete(tmp_path / "run", "failed", "rank 1: ImportError: <no>")
    html = report.write(tmp_path / "run").read_text()
    assert "rank 1: ImportError: &lt;no&gt;" in html and not charts_of(html)


def test_values_that_are_not_finite_are_gaps(tmp_path):
    html = report.write(make_run(tmp_path / "run", steps=5, loss=math.nan, grad_norm=math.inf)).read_text()
    charts = charts_of(html)
    assert "Gradient norm before clipping" not in charts and "Learning rate" in charts
    assert set(charts["Loss"]["series"][0]["values"]) == {None}
    assert [value for value in charts["Loss"]["series"][1]["values"] if value] == [5.5, 2.25]


def test_a_loss_scale_that_moves_is_shown(tmp_path):
    run_dir = make_run(tmp_path / "run")
    lines = (run_dir / "metrics.jsonl").read_text().replace('"amp/loss_scale": 1.0', '"amp/loss_scale": 65536.0', 10)
    (run_dir / "metrics.jsonl").write_text(lines)
    assert charts_of(report.write(run_dir).read_text())["Loss scale"]["log"]


def test_thinning_a_long_run_keeps_extremes_and_rare_points():
    n = 100_000
    loss = [2 + math.sin(i / 1000) for i in range(n)]
    loss[54_321], loss[77_777], loss[5] = 50.0, -3.0, math.nan
    rare = [float(i) if i % 10_000 == 3 else None for i in range(n)]
    chart = page.chart("Loss", list(range(n)), [{"label": "a", "values": loss}, {"label": "b", "values": rare}])
    assert len(chart["x"]) < 2 * page.MOST_POINTS and chart["x"][0] == 0 and chart["x"][-1] == n - 1
    values = dict(zip(chart["x"], chart["series"][0]["values"], strict=True))
    assert values[54_321] == 50 and values[77_777] == -3
    assert [value for value in chart["series"][1]["values"] if value is not None] == [i * 10_000 + 3 for i in range(10)]


def test_the_command_writes_the_page_or_says_why_not(tmp_path):
    def command(*words):
        return subprocess.run(
            [sys.executable, "-m", "tracking.report", *words], cwd=REPO, capture_output=True, text=True, timeout=30
        )

    run_dir = make_run(tmp_path / "run")
    assert command(str(run_dir)).stdout.strip() == str(run_dir / "report.html")
    assert command(str(tmp_path / "nowhere")).returncode == 2 and command().returncode == 2
    (run_dir / "result.json").write_text("{")
    done = command(str(run_dir))
    assert done.returncode == 1 and "result.json is damaged" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
def test_a_browser_draws_every_chart(tmp_path):
    file = report.write(make_run(tmp_path / "run"))
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update"
    flags += " --disable-sync --no-first-run --enable-logging=stderr --virtual-time-budget=2000 --dump-dom"
    words = ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'browser'}", file.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    # Charts are drawn after they are laid out: an error while drawing leaves a canvas that is empty.
    assert done.stdout.count("<canvas") == 4 and "Uncaught" not in done.stderr
