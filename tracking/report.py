"""The report page of one run: python -m tracking.report RUN_DIR."""

import sys
from html import escape
from pathlib import Path

from omegaconf import OmegaConf

from tracking import page, result
from tracking.console import short
from tracking.history import read

FILE = "report.html"


def write(run_dir: str | Path) -> Path:
    """Writes report.html from what the run has left in its folder so far; returns its path.

    Raises OSError when it cannot be written, ValueError when a file in the folder is damaged.
    """
    run_dir = Path(run_dir)
    path = run_dir / FILE
    path.write_text(html(run_dir), encoding="utf-8")
    return path


def again(run_dir: str | Path) -> None:
    """Writes report.html anew where there is one: whoever started the ranks knows better how the run ended."""
    if (Path(run_dir) / FILE).exists():
        write(run_dir)


def html(run_dir: Path) -> str:
    """The page. A run that was killed, or still goes on, has no result.json; then its metrics say how far it came."""
    steps: dict[int, dict[str, float]] = {}
    summary = result.Summary()
    for line in read(run_dir):
        step = int(line.pop("step"))
        steps.setdefault(step, {}).update(line)
        summary.add(step, line)
    found = {"status": "unfinished"} | summary.fields() | result.load(run_dir, result.FACTS_FILE) | result.load(run_dir)
    frozen = run_dir / "resolved.yaml"
    config = OmegaConf.to_container(OmegaConf.load(frozen)) if frozen.exists() else {}
    title = " · ".join(result.named(found.get("choices", {}))) or run_dir.name
    drawn = charts(steps, config)
    body = _head(title, found, run_dir) + page.places(drawn) + _probed(steps) + _rest(found, config)
    return page.document(title, body, drawn, ("charts.js",))


def charts(steps: dict[int, dict[str, float]], config: dict) -> list[dict]:
    """Charts of a run over its tokens; `steps` maps a step to all its metrics."""
    tokens = [metrics["tokens"] for metrics in steps.values()]

    def series(label: str, name: str, **more) -> dict:
        return {"label": label, "values": [metrics.get(name) for metrics in steps.values()]} | more

    norms = [series("gradient norm", "grad/norm")]
    clip = config.get("clip", {})
    if clip.get("kind") in ("fixed", "by_model_size"):
        norms.append({"label": "clip threshold", "values": [clip["max_norm"]] * len(tokens), "dash": True, "color": 4})
    elif clip.get("kind") == "adaptive":
        norms.append(series("clip threshold", "grad/clip_threshold", dash=True, color=4))
    wanted = [
        ("Loss", [series("training", "train/loss"), series("validation", "val/loss", emphasis=True)]),
        ("Gradient norm before clipping", norms),
        ("Learning rate", [series("learning rate", "train/lr", color=2)]),
        (
            "Tokens per second",
            [series("step", "perf/tokens_per_s", color=3), series("average", "perf/tokens_per_s_avg")],
        ),
        ("Loss scale", [series("loss scale", "amp/loss_scale")]),
        (
            "Share lost to the number format",
            [
                series("gradient underflow", "amp/underflow_fraction", emphasis=True),
                series("gradient overflow", "amp/overflow_fraction", emphasis=True),
                series("updates", "amp/lost_updates", emphasis=True),
            ],
        ),
        ("Largest activation", [series("largest", "amp/largest_activation", emphasis=True)]),
        ("Relative error of the worst layer", [series("error", "amp/relative_error", emphasis=True)]),
    ]
    found = []
    for title, lines in wanted:
        measured = [value for line in lines if "dash" not in line for value in line["values"]]
        values = [value for value in measured if value is not None and 0 < value < float("inf")]
        if not values or (title == "Loss scale" and len(set(values)) == 1):
            continue
        # Norms and loss scales run over orders of magnitude; a linear axis would show their largest value only.
        log = title in ("Gradient norm before clipping", "Loss scale") and max(values) > 30 * min(values)
        found.append(page.chart(title, tokens, lines, log=log, from_zero=title == "Tokens per second"))
    return found


def _probed(steps: dict[int, dict[str, float]]) -> str:
    """The last numeric probe, a line for each layer; nothing when there was none."""
    last = next((step for step in reversed(steps) if "probe/cost_s" in steps[step]), None)
    if last is None:
        return ""
    layers: dict[str, list[str]] = {}
    for name, value in steps[last].items():
        if name.startswith("probe/") and name.count("/") == 2:
            _, what, layer = name.split("/")
            layers.setdefault(layer, []).append(f"{what.replace('_', ' ')} {value:.3g}")
    rows = {layer: " · ".join(found) for layer, found in layers.items()}
    return page.folded(f"Numbers layer by layer, step {last}", page.table(rows))


def _head(title: str, found: dict, run_dir: Path) -> str:
    status = found["status"]
    said = [found.get("cause"), found.get("verdict")]
    lines = "".join(f"<p>{escape(sentence)}</p>" for sentence in said if sentence)
    return (
        f'<h1>{escape(title)}<span class="status {status}">{status}</span></h1>'
        f'<p class="soft">{escape(short(run_dir))} · {escape(str(found.get("started", "")))}</p>{lines}'
        + page.figures(list(_figures(found)))
    )


def _figures(found: dict):
    def number(name: str, form: str) -> str:
        value = found.get(name)
        return "–" if value is None else format(float(value), form)

    start = number("val_loss_start", ".3f")
    yield (
        "Validation loss",
        number("val_loss_final", ".3f"),
        f"{start} at the start, {number('val_loss_best', '.3f')} at best",
    )
    yield "Training loss", number("loss_final", ".3f"), f"{number('loss_best', '.3f')} at best"
    yield (
        "Tokens/s",
        number("tokens_per_s", ",.0f"),
        f"{number('step_s', '.3g')} s a step on {found.get('device')}",
    )
    if found.get("mfu") is not None:
        yield "MFU", number("mfu", ".1%"), f"of {found['peak_tflops']:.3g} TFLOP/s: {found['peak_source']}"
    yield "Steps", number("steps", ",.0f"), f"{number('tokens', ',.0f')} tokens"
    yield "Clipped", number("clip_fraction", ".0%"), f"of the updates; {number('skipped_steps', '.0f')} steps skipped"
    if found.get("peak_gib") is not None:
        yield "Peak memory", number("peak_gib", ".2f") + " GiB", "of the logging rank's device"


def _rest(found: dict, config: dict) -> str:
    parts = []
    if sample := found.get("sample"):
        parts.append(page.card("The model writes", page.text(sample["prompt"] + sample["text"])))
    if found_norms := found.get("grad_norms"):
        shares = {f"clipped by {limit}": f"{share:.0%}" for limit, share in found_norms["would_clip"].items()}
        quantiles = {name: f"{found_norms[name]:.3g}" for name in ("p10", "p50", "p90", "p99", "max")}
        parts.append(page.card("Gradient norm before clipping", page.table(quantiles | shares)))
    about = {
        "Repeat with": found.get("run_command"),
        "Parameters": found.get("parameters") and f"{found['parameters']:,}",
        "Ranks": found.get("rank_map"),
        "Device": found.get("device"),
        "Data": found.get("data") and result.data_in_words(found["data"]),
        "Versions": ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items() if version)
        or None,
        "Commit": found.get("git_commit"),
        "Configuration hash": found.get("config_hash"),
        "Started": found.get("started"),
        "Ended": found.get("ended"),
    }
    parts.append(page.card("About this run", page.table(about)))
    groups = "".join(
        f"<div><b>{escape(name)}</b>{page.table(values)}</div>"
        for name, values in config.items()
        if isinstance(values, dict)
    )
    if groups:
        parts.append(page.folded("Configuration", f'<div class="groups">{groups}</div>'))
    return "".join(parts)


def main() -> int:
    """Writes the page of the run folder named on the command line and prints its path."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("usage: python -m tracking.report RUN_DIR", file=sys.stderr)
        return 2
    try:
        print(write(sys.argv[1]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
