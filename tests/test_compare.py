"""Comparing runs without W&B: every point accounted for, whatever became of it, in the table, the CSV and the page."""

import csv
import json
import math
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import made_runs
import pytest

from tracking import compare, curves, page, runs
from tracking.differences import differences, ranges
from tracking.table import table

REPO = Path(__file__).resolve().parent.parent
ENDS = dict(
    enumerate(["ok", "nan", "oom", "timeout", "failed", "interrupted", "killed", "missing", "skipped", "damaged"])
)
# What a point is called that ended so.
STATUS = {"killed": "interrupted"}
BROWSER = (
    "chromium --headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --enable-logging=stderr --virtual-time-budget=4000 --dump-dom"
).split()
needs_browser = pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """Twelve points that ended in every way there is; treat it as read-only but for compare's own files."""
    folder = tmp_path_factory.mktemp("sweeps") / "2026-01-02_03-04-05"
    axes = {"parallel": ["dp2", "tp2", "pp2"], "precision": ["fp32", "fp16"], "optimizer.lr": ["0.001", "0.0003"]}
    return made_runs.sweep(folder, 60, ENDS, **axes)


@pytest.fixture
def three(tmp_path) -> Path:
    """Three points that went well."""
    return made_runs.sweep(tmp_path / "three", 40, parallel=["dp2", "tp2", "zero1"])


def command(*words: str | Path, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tracking.compare", *map(str, words)]
    env = {"PATH": "", "PYTHONPATH": str(REPO)}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def data_of(html: str) -> dict:
    """What a page draws."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL).group(1))


def rows_of(text: str) -> list[list[str]]:
    """The lines of a table, cut where there are two spaces."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.partition("\n\n")[0].splitlines()]


# What is found


def test_every_point_is_there_with_its_status_and_cause(sweep):
    found = runs.find([sweep])
    assert [run.number for run in found] == list(range(12))
    for run in found:
        end = ENDS.get(run.number, "ok")
        assert run.status == STATUS.get(end, end)
        assert bool(run.cause) == (run.status != "ok")
    assert found[6].cause.startswith("left no result.json: killed, or still running; came to step ")
    assert found[6].value("loss_final") > 0 and found[6].value("steps") > 0
    assert found[8].cause.startswith("pp must divide the layers")
    assert math.isnan(found[1].value("loss_final")) and found[1].value("loss_best") > 0


def test_a_point_without_a_folder_is_known_by_what_the_sweep_says(sweep):
    missing = runs.find([sweep])[7]
    assert missing.choices["parallel"] == "tp2" and missing.choices["precision"] == "fp16" and missing.config_hash
    assert runs.value_of(missing, "optimizer.lr") == "0.0003"


DAMAGE = {
    "result.json": [b"{", b"\xff\xfe\x00", b"[1]", b"null", b"[" * 100_000, b'{"status": "great"}', b""],
    "resolved.yaml": [b"{{{", b"\xff\xfe\x00", b"[1]", b"a: !!python/object:os.system x", b"\t"],
    "facts.json": [b"{", b"[1]"],
    "metrics.jsonl": [b'{"step": 1}\n{"step": 2, "train/loss": [1]}\n', b"\xff\n", b'{"train/loss": 1}\n', b"[1]\n"],
}


@pytest.mark.parametrize(("name", "content"), [(name, content) for name in DAMAGE for content in DAMAGE[name]])
def test_a_damaged_file_is_named_and_the_rest_is_shown(three, name, content):
    (three / "1_tiny_tp2_fp32_adamw" / name).write_bytes(content)
    page_of_all = compare.write(three).read_text()
    first, damaged, last = runs.find([three])
    damaged.metrics()
    assert name in damaged.problem and "\n" not in damaged.problem
    assert first.status == last.status == "ok" and not first.problem
    assert damaged.status == ("damaged" if name == "result.json" else "ok")
    assert escape(damaged.problem) in page_of_all.partition("Points that did not end well")[2]
    assert "tp2" in table([first, damaged, last])


def test_fields_of_the_wrong_kind_are_not_shown_as_numbers(three):
    file = three / "1_tiny_tp2_fp32_adamw" / "result.json"
    known = json.loads(file.read_text())
    wrong = {"loss_final": [1], "tokens_per_s": "fast", "mfu": True, "peak_gib": {}, "choices": [1], "overrides": 7}
    file.write_text(json.dumps(known | wrong | {"cause": 5, "versions": "new", "started": 9}))
    assert runs.find([three])[1].value("loss_final") is None
    compare.write(three)


def test_a_damaged_list_of_points_is_said_and_the_folders_are_found(three):
    for content in ("{", "[]", '{"points": [1]}', '{"points": 3}', '{"points": [{"number": 1}]}'):
        (three / "sweep.json").write_text(content)
        found = runs.find([three])
        assert sorted(run.status for run in found) == ["damaged", "ok", "ok", "ok"]
        assert "sweep.json is damaged" in table(found)


def test_a_run_of_another_configuration_than_its_folder_says_is_noticed(three):
    folder = three / "1_tiny_tp2_fp32_adamw"
    known = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(known | {"config_hash": "0" * 64}))
    assert "another configuration" in runs.find([three])[1].problem


def test_runs_of_several_sweeps_keep_apart(three, sweep, tmp_path):
    found = runs.find([sweep, three, three / "0_tiny_dp2_fp32_adamw"])
    assert [run.number for run in found] == list(range(15))
    assert str(three / "2_tiny_zero1_fp32_adamw") in table(found)
    assert len(runs.find([three])) == 3


def test_links_collect_runs_and_circles_of_links_end(three, tmp_path):
    collected = tmp_path / "collected"
    collected.mkdir()
    (collected / "best").symlink_to(three / "1_tiny_tp2_fp32_adamw")
    (collected / "again").symlink_to(collected)
    assert [run.choices["parallel"] for run in runs.find([collected])] == ["tp2"]


# What tells points apart


def test_the_columns_are_what_was_chosen_and_set(sweep):
    assert runs.labels(runs.find([sweep])) == ["parallel", "precision", "optimizer.lr"]


def test_a_yaml_that_was_edited_between_two_runs_is_a_column(three):
    file = three / "1_tiny_tp2_fp32_adamw" / "resolved.yaml"
    file.write_text(file.read_text().replace("weight_decay: 0.1", "weight_decay: 0.2"))
    again = made_runs.sweep(three.parent / "again", 40, parallel=["tp2"])
    # With the same choices only the edited value can tell these two apart.
    assert runs.labels(runs.find([file.parent, again])) == ["optimizer.weight_decay"]


def test_differences_are_told_by_choice_where_that_decides_and_by_number_elsewhere(sweep):
    found = {one.key: one.values for one in differences(runs.find([sweep]))}
    assert found["parallel.tp"] == [("1", "dp2, pp2"), ("2", "tp2")]
    assert dict(found["precision.params"]) == {"fp32": "fp32", "fp16": "fp16"}
    # The points 7 and 8 have no configuration: one has no folder, the other was left out.
    assert dict(found["optimizer.lr"]) == {"0.001": "#0, 2, 4, 6, 10", "0.0003": "#1, 3, 5, 9, 11"}
    assert "tracking.mode" not in found and "parallel.name" not in found
    assert ranges([9, 0, 1, 2, 3, 5, 6]) == "0–3, 5, 6, 9"


# The table


def test_the_table_says_all_of_every_point(sweep):
    head, *lines = rows_of(table(runs.find([sweep])))
    assert head[:5] == ["#", "parallel", "precision", "lr", "status"]
    assert head[5:] == (
        [
            "val loss",
            "best val",
            "train loss",
            "best train",
            "tokens/s",
            "MFU",
            "peak GiB",
            "clipped",
            "skipped",
            "cause",
        ]
    )
    assert [line[4] for line in lines[:3]] == ["ok", "nan", "oom"] and "CUDA out of memory" in lines[2][-1]
    assert "12 points: 3 ok, 2 interrupted" in table(runs.find([sweep]))


def test_by_and_metric_order_the_table_and_sum_it_up(sweep):
    text = table(runs.find([sweep]), by="precision", metric="perf/tokens_per_s")
    lines = rows_of(text)[1:]
    assert [line[2] for line in lines] == ["fp16"] * 6 + ["fp32"] * 6
    good = [line for line in lines if line[4] == "ok"]
    speed = [float(line[9].replace(",", "")) for line in good if line[2] == "fp16"]
    assert speed == sorted(speed, reverse=True)
    states = [line[4] for line in lines if line[2] == "fp16"]
    assert states == sorted(states, key=lambda status: status != "ok")
    assert "perf/tokens_per_s by precision, of the points that ended ok" in text and "best point" in text
    losses = [line[5] for line in rows_of(table(runs.find([sweep]), metric="val/loss"))[1:] if line[4] == "ok"]
    assert losses == sorted(losses, key=float)


def test_a_metric_that_is_in_no_column_gets_one(sweep):
    head, first, *_ = rows_of(table(runs.find([sweep]), metric="grad/norm"))
    assert "grad/norm" in head and float(first[head.index("grad/norm")]) > 0


def test_names_that_no_run_has_are_refused_with_those_there_are(sweep):
    with pytest.raises(ValueError, match=r"no run has the metric los; there are: .*train/loss"):
        table(runs.find([sweep]), metric="los")
    with pytest.raises(ValueError, match=r"no run has presicion; there are: .*precision"):
        table(runs.find([sweep]), by="presicion")


# The files


def test_the_csv_has_every_point_and_numbers_that_read_back(sweep):
    with (compare.write(sweep).parent / "compare.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["number"]) for line in lines] == list(range(12))
    assert float(lines[0]["loss_final"]) == runs.find([sweep])[0].value("loss_final")
    assert math.isnan(float(lines[1]["loss_final"])) and lines[7]["loss_final"] == ""
    assert lines[3]["cause"].startswith("nothing moved for 600 s") and (sweep / lines[0]["folder"]).is_dir()


def test_the_page_needs_no_network_and_has_every_point(sweep):
    html = compare.write(sweep).read_text()
    assert not re.search(r'(?:src|href)="(?!data:)|@import|url\(|fetch\(|XMLHttpRequest|import\(', html)
    assert [run["n"] for run in data_of(html)["runs"]] == list(range(12))
    for status in ("ok", "nan", "oom", "timeout", "failed", "interrupted", "missing", "skipped", "damaged"):
        assert f'<span class="status {status}">{status}</span>' in html
    assert "silent" in html and "killed by signal 9" in html and "3 ok, 1 nan" in html


def test_a_point_with_a_page_of_its_own_is_linked(three):
    (three / "1_tiny_tp2_fp32_adamw" / "report.html").write_text("")
    assert '<a href="1_tiny_tp2_fp32_adamw/report.html">1</a>' in compare.write(three).read_text()
    command(three, "--out", three.parent / "elsewhere")
    html = (three.parent / "elsewhere" / "compare.html").read_text()
    assert '<a href="../three/1_tiny_tp2_fp32_adamw/report.html">1</a>' in html


def test_nothing_that_a_run_wrote_becomes_part_of_the_page(three):
    hostile = '</script><img src=x onerror="alert(1)">'
    folder = three / "1_tiny_tp2_fp32_adamw"
    known = json.loads((folder / "result.json").read_text())
    choices = {"choices": known["choices"] | {"optimizer": hostile}, "device": hostile, "started": hostile}
    (folder / "result.json").write_text(json.dumps(known | choices | {"status": "failed", "cause": hostile}))
    frozen = (folder / "resolved.yaml").read_text().replace("optimizer: adamw", f"optimizer: {json.dumps(hostile)}")
    (folder / "resolved.yaml").write_text(frozen + f"? {json.dumps(hostile)}\n: 1\n")
    html = compare.write(three).read_text()
    assert "&lt;/script&gt;&lt;img" in html and "<img" not in html and html.count("</script>") == 3


def test_long_curves_keep_every_peak_and_every_nan(tmp_path):
    n = 20_000
    losses = [2 + math.sin(i / 1000) for i in range(n)]
    losses[12_345], losses[7_777], losses[15_000], losses[n - 1] = 50.0, -3.0, math.inf, math.nan
    lines = (
        json.dumps({"step": i, "tokens": 10 * i, "perf/step_s": 0.5, "train/loss": made_runs.result.plain(loss)}) + "\n"
        for i, loss in enumerate(losses)
    )
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (run,) = runs.find([tmp_path])
    curve = curves.of_run(run, runs=60)["loss"]
    assert len(curve["x"]) == len(curve["y"]) == len(curve["t"]) == len(curve["smooth"]) < 700
    at = dict(zip(curve["x"], curve["y"], strict=True))
    assert at[123_450] == 50 and at[77_770] == -3 and at[150_000] is None and at[10 * n - 10] is None
    assert sum(value is None for value in curve["y"]) == 2
    assert curve["t"][-1] == n / 2 and curve["x"] == sorted(curve["x"])
    assert all(0.5 < value < 4 for value in curve["smooth"] if value is not None)


def test_short_curves_are_whole(three):
    for run in runs.find([three]):
        assert curves.of_run(run, runs=3)["loss"]["x"] == [step * 2048 for step in range(1, 41)]


def test_thinning_keeps_one_of_many_values_that_are_not_finite():
    kept = page.thin([1.0] * 500 + [math.nan] * 5000 + [2.0] * 500, most=100)
    assert len(kept) < 200 and any(500 <= i < 5500 for i in kept)


# The command


def test_the_command_prints_and_writes_without_torch(three):
    done = command(three, "--by", "parallel", "--metric", "val/loss")
    assert done.returncode == 0 and "3 points: 3 ok" in done.stdout and "val/loss by parallel" in done.stdout
    assert (three / "compare.csv").exists() and str(three / "compare.html") in done.stdout
    code = "import sys, tracking.compare; sys.exit('torch' in sys.modules or 'wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, timeout=60).returncode == 0


def test_several_folders_are_written_where_one_stands(three, sweep, tmp_path):
    done = command(three, sweep, cwd=tmp_path)
    assert "15 points" in done.stdout and (tmp_path / "compare.html").exists()


def test_the_command_says_why_it_cannot(three, tmp_path):
    (tmp_path / "empty").mkdir()
    for words, said in (
        ([tmp_path / "empty"], "There is no run in"),
        ([tmp_path / "nowhere"], "nowhere is no folder"),
        ([three, "--metric", "speed"], "no run has the metric speed"),
        ([three, "--by", "layout"], "no run has layout"),
        ([three, "--out", three / "sweep.json"], "sweep.json"),
    ):
        done = command(*words)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


# In a browser

# Filters one choice out, sorts by speed, switches every switch, points at a curve; leaves what it finds in the title.
USE = """<script>setTimeout(() => {
  const rows = () => [...document.querySelectorAll("tbody tr")].filter((row) => !row.hidden && row.dataset.run);
  document.querySelector('.chips button[data-value="fp32"]').click();
  const filtered = rows().length;
  const column = [...document.querySelectorAll(".points th")].findIndex((th) => th.textContent === "tokens/s");
  document.querySelectorAll(".points th button")[column].click();
  const speeds = rows().map((row) => row.cells[column].dataset.v).filter(Boolean).map(Number);
  document.getElementById("smooth").click();
  document.querySelector("#loss .log").click();
  document.getElementById("x").value = "t";
  document.getElementById("x").onchange();
  setTimeout(() => {
    const over = document.querySelector("#loss .u-over"), box = over.getBoundingClientRect();
    for (let y = 0; y < box.height && !document.querySelector("tr.lit"); y += 5)
      for (const kind of ["mouseenter", "mousemove"])
        over.dispatchEvent(new MouseEvent(kind, { clientX: box.left + 100, clientY: box.top + y, bubbles: true }));
    const pointed = document.querySelector("#loss .readout b")?.textContent ?? "";
    document.title = JSON.stringify([filtered, speeds, pointed, document.querySelectorAll("tr.lit").length]);
  }, 300);
}, 300);</script></body>"""


def browse(file: Path, profile: Path) -> tuple[str, str]:
    """The page after its scripts ran, and what the browser complained of."""
    words = [*BROWSER, f"--user-data-dir={profile}", file.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@needs_browser
def test_a_browser_draws_filters_sorts_and_points(sweep, tmp_path):
    file = tmp_path / "used.html"
    file.write_text(compare.write(sweep).read_text().replace("</body>", USE))
    dom, complaints = browse(file, tmp_path / "browser")
    assert not complaints and dom.count("<canvas") == 3
    filtered, speeds, pointed, lit = json.loads(re.search(r"<title>(.*?)</title>", dom).group(1))
    assert filtered == 6 and len(speeds) > 2 and speeds == sorted(speeds)
    assert "fp16" in pointed and lit == 1


@needs_browser
def test_what_was_reached_is_drawn_against_each_number_that_was_swept(tmp_path):
    axes = {"optimizer.lr": ["1e-3", "1e-2", "1e-1"], "parallel": ["dp2", "tp2"], "train.seed": ["1", "2"]}
    folder = made_runs.sweep(tmp_path / "lr", 20, {11: "nan"}, **axes)
    file = compare.write(folder)
    (chart,) = data_of(file.read_text())["outcomes"]
    assert chart["title"] == "Final validation loss against optimizer.lr" and chart["log"]
    names = [curve["name"] for curve in chart["curves"]]
    assert names == ["dp2 (#0, 1, 4, 5, 8, 9)", "tp2 (#2, 3, 6, 7, 10)"], "seeds are repetitions, a NaN is no outcome"
    assert all(curve["x"] == [0.001, 0.01, 0.1] for curve in chart["curves"])
    losses = [json.loads((run / "result.json").read_text())["val_loss_final"] for run in sorted(folder.glob("[01]_*"))]
    assert chart["curves"][0]["y"][0] == pytest.approx(sum(losses) / 2, rel=1e-4)
    dom, complaints = browse(file, tmp_path / "browser")
    assert not complaints and dom.count("<canvas") == 4


@needs_browser
def test_a_sweep_in_which_nothing_began_has_a_page_that_works(tmp_path):
    folder = made_runs.sweep(tmp_path / "none", 10, {0: "missing", 1: "skipped"}, parallel=["dp2", "tp2"])
    dom, complaints = browse(compare.write(folder), tmp_path / "browser")
    assert not complaints and "No point has come as far" in dom and "not started" in dom and "<canvas" not in dom


@pytest.mark.slow
def test_sixty_runs_of_two_thousand_steps_make_a_page_of_less_than_five_megabytes(tmp_path):
    axes = {"parallel": ["dp2", "tp2", "pp2", "zero1", "zero3"], "precision": ["fp32", "bf16", "fp16"]}
    folder = made_runs.sweep(tmp_path / "sixty", 2000, ENDS, **axes, clip=["0.01", "0.1", "1.0", "none"])
    file = compare.write(folder)
    assert file.stat().st_size < 5_000_000 and len(data_of(file.read_text())["runs"]) == 60
    if shutil.which("chromium"):
        dom, complaints = browse(file, tmp_path / "browser")
        assert not complaints and dom.count("<canvas") == 3
