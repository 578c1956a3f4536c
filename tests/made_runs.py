"""Run folders as sweeps leave them, without training: curves with noise, peaks and NaN, and every way to end."""

import json
import math
import random
from itertools import product
from pathlib import Path

import tracked
from omegaconf import OmegaConf

from parallel import frozen, rules
from tracking import result

CONF = Path(__file__).resolve().parent.parent / "conf"
ENDS = {
    "nan": "FloatingPointError: the loss is nan in step {step}, before the update",
    "oom": "rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "timeout": "nothing moved for 600 s; rank 3 was silent, last seen in step {step}",
    "failed": "rank 2: killed by signal 9 (log: ranks/rank2.log)",
    "interrupted": "stopped by signal 2",
}


def sweep(folder: Path, steps: int, ends: dict[int, str] | None = None, **axes: list[str]) -> Path:
    """A sweep folder with the product of the options in `axes`; `ends` says how some points end other than ok.

    Besides the statuses: "killed" leaves no result.json, "missing" no folder, "damaged" a result.json cut in half,
    "skipped" is an illegal point.
    """
    folder.mkdir(parents=True)
    base = tracked.point(folder / "base", f"train.steps={steps}", "train.global_batch=8", "launch.device=cpu")
    base_cfg = OmegaConf.create(
        {group: OmegaConf.load(folder / "base" / frozen.FILE)[group] for group in frozen.GROUPS}
    )
    for file in (folder / "base").iterdir():
        file.unlink()
    (folder / "base").rmdir()
    points = []
    for number, picked in enumerate(product(*axes.values())):
        differs = dict(zip(axes, picked, strict=True))
        choices, cfg = dict(base.choices), base_cfg.copy()
        for name, value in differs.items():
            if name in choices:
                choices[name] = value
                cfg = OmegaConf.merge(cfg, {name: OmegaConf.load(CONF / name / f"{value}.yaml")})
            else:
                OmegaConf.update(cfg, name, int(value) if value.isdecimal() else float(value))
        if cfg.parallel.dp == "auto":
            cfg.parallel.dp = cfg.parallel.dp_on_cpu
        name = "_".join([str(number), *(choices[group] for group in ("model", "parallel", "precision", "optimizer"))])
        end = (ends or {}).get(number, "ok")
        overrides = [f"{key}={value}" for key, value in differs.items()]
        if end not in ("missing", "skipped"):
            point = frozen.freeze(cfg, folder / name, choices, overrides)
            run(folder / name, point, number, end)
        points.append(
            {"number": number, "folder": name, "overrides": overrides, "config_hash": frozen.config_hash(cfg)}
            | {"choices": choices, "differs": differs}
            | {"skipped": "pp must divide the layers; the nearest legal choice is pp=2" if end == "skipped" else None}
        )
    (folder / "sweep.json").write_text(json.dumps({"id": folder.name, "command": ["train.py"], "points": points}))
    return folder


def run(run_dir: Path, point: frozen.Frozen, number: int, end: str) -> None:
    """Metrics and result of one point, the same for the same number."""
    chance = random.Random(number)
    cfg, world = point.cfg, rules.world_size(point.cfg)
    tokens_per_step = cfg.train.global_batch * cfg.train.seq_len
    speed = 9_000 * world**0.8 * {"fp32": 1, "tf32": 2.1}.get(cfg.precision.name, 3.4) * chance.uniform(0.9, 1.1)
    memory = (2.5 if cfg.precision.name == "fp32" else 1.6) / (cfg.parallel.tp * cfg.parallel.pp) ** 0.7 + 0.3
    limit = cfg.clip.max_norm if cfg.clip.kind.value == "fixed" else math.inf
    floor = chance.uniform(1.3, 1.7) + (0.4 if limit < 0.1 else 0.0)
    fp16 = cfg.precision.loss_scale == "dynamic"
    stop = cfg.train.steps if end in ("ok", "damaged") else int(cfg.train.steps * chance.uniform(0.2, 0.9))
    summary, lines, clipped, skipped = result.Summary(), [], 0, 0

    def add(step: int, metrics: dict) -> None:
        summary.add(step, metrics)
        lines.append(json.dumps(result.plain({"step": step, "tokens": step * tokens_per_step} | metrics)) + "\n")

    add(0, {"val/loss": 5.545})
    for step in range(1, stop + 1):
        peak = 3 * chance.random() if chance.random() < 0.002 else 0.0
        loss = floor + (5.5 - floor) * (1 + step / 30) ** -0.6 + chance.gauss(0, 0.06) + peak
        norm = (0.4 + 8 / (1 + step / 10)) * chance.lognormvariate(0, 0.3) * (1 + 10 * peak)
        skipped += (skip := fp16 and chance.random() < 0.004)
        clipped += norm > limit
        step_s = tokens_per_step / speed * chance.lognormvariate(0, 0.05)
        if end == "nan" and step == stop:
            add(step, {"train/loss": math.nan})
            break
        metrics = {
            "train/loss": loss,
            "train/lr": cfg.optimizer.lr * min(1, step / 100),
            "grad/norm": math.inf if skip else norm,
            "grad/clip_coef": min(1.0, limit / norm),
            "grad/clipped": int(norm > limit),
            "grad/clip_fraction": clipped / step,
            "amp/loss_scale": 65536.0 if fp16 else 1.0,
            "amp/skipped_steps": skipped,
            "mem/peak_gib": memory,
            "time/eta_s": (cfg.train.steps - step) * step_s,
        }
        rates = {
            "step_s": step_s,
            "tokens_per_s": tokens_per_step / step_s,
            "mfu": speed / 1e6,
            "data_wait_share": 0.01,
        }
        rates |= {"tflops_per_device": speed / 1e5, "tokens_per_s_per_device": speed / world}
        for name, value in rates.items():
            metrics |= {f"perf/{name}": value, f"perf/{name}_avg": value}
        metrics |= {"perf/tokens_per_s_avg": speed, "perf/step_s_avg": tokens_per_step / speed}
        add(step, metrics)
        if step % max(1, cfg.train.steps // 20) == 0:
            add(step, {"val/loss": loss + 0.05 - peak})
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    facts = result.facts(point, {"parameters": 3_000_000, "device": f"{world} × Abacus 9"})
    result.write(run_dir, result.FACTS_FILE, **facts)
    if end != "killed":
        status = "ok" if end == "damaged" else end
        cause = ENDS[end].format(step=stop) if end in ENDS else None
        result.write(run_dir, status=status, cause=cause, **summary.fields(), **facts, ended=result.now())
    if end == "damaged":
        whole = (run_dir / result.FILE).read_bytes()
        (run_dir / result.FILE).write_bytes(whole[: len(whole) // 2])
