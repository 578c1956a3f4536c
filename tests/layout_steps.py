"""A few training steps under several layouts in the same processes, for the tests: one start serves many layouts.

python layout_steps.py FOLDER PORT...    as rank RANK of WORLD_SIZE; writes FOLDER/LAYOUT.json, {case: [step, ...]}
"""

import dataclasses
import json
import os
import sys
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from parallel import compose

LAYOUTS = ("tp2", "pp2", "zero1", "zero3")
SMALL = (
    "train.global_batch=4 train.micro_batch=1 train.seq_len=32 schedule.warmup_steps=1 model.layers=2 model.hidden=32 "
    "model.ffn_hidden=64 model.heads=4 model.kv_heads=2 launch.device=cpu data=mock"
).split()
# The loss scale overflows, settles and grows into the next overflow.
CASES = {
    "scale": "train.steps=14 precision=fp16 precision.initial_loss_scale=16777216 precision.hysteresis=1 "
    "precision.loss_scale_window=3",
    "judged in FP16": "train.steps=4 precision=fp32 probe.every=2 probe.format=fp16",
    "no masters": "train.steps=4 precision=bf16_pure probe.every=2 optimizer.lr=1e-4",
    "emulated FP8": "train.steps=4 precision=fp8 precision.bf16_last_layers=1 probe.every=2",
}


def config(layout: str, words: str):
    """The checked configuration of a case under a layout."""
    return OmegaConf.to_object(compose.check(compose.compose([*SMALL, f"parallel={layout}", *words.split()])[0]))


def train(cfg, device) -> list[dict]:
    """The steps of train.py's loop without what surrounds them; loss, loss scale, update and probe of each."""
    from data.batches import Batches, load
    from models import attention, loss
    from optim import build, clip
    from parallel import facts, wrap
    from precision import probes, setup

    setup.apply(cfg)
    attention.install(cfg.model.attention, cfg.precision.compute)
    chunks = wrap.model_chunks(cfg, device)
    optimizer = build.optimizer(cfg, chunks)
    schedule = build.schedule(cfg, optimizer)
    clipper, probe = clip.Clipper(cfg, chunks, optimizer), probes.Probe(cfg, chunks, optimizer)
    wrap.connect(chunks, optimizer, cfg)
    batches = Batches(load(cfg).train, cfg.train, *facts.data_rank(), cfg.train.seed)
    found = []
    for step in range(1, cfg.train.steps + 1):
        schedule.step(1)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        scale = optimizer.get_loss_scale().item()
        probe.begin(step)
        train_loss = loss.run(chunks, batches.step(step - 1), cfg.train, backward=True)
        update = clipper.step(partial(probe.gradients, scale))
        probed, histograms = probe.end(updated=not update.skipped)
        told = {name: [counts, edges] for name, (counts, edges) in histograms.items()}
        found.append({"loss": train_loss, "scale": scale, **dataclasses.asdict(update), **probed, **told})
    batches.close()
    return found


def main(folder: Path, ports: list[str]) -> None:
    """All cases under all layouts, as one of the ranks."""
    from parallel import groups, quiet

    quiet.libraries()
    for layout, port in zip(LAYOUTS, ports, strict=True):
        os.environ["MASTER_PORT"] = port
        device = groups.start(config(layout, ""))
        found = {case: train(config(layout, words), device) for case, words in CASES.items()}
        if os.environ["RANK"] == "0":
            (folder / f"{layout}.json").write_text(json.dumps(found))
        groups.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
