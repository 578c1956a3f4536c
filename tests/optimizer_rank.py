"""A rank that trains a tiny model a few steps under many configurations, one after the other, in one start.

`trace` is what one process or each of several does for one configuration; as a program it reads `cases.json` in the
folder of a run, {name: overrides}, and rank 0 writes what each case gave to `traces.json`; the state at the end of a
case goes where the folder `saved` has one of its name, and a case that the folder `given` has state of takes no steps.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

SMALL = (
    "train.global_batch=4 train.micro_batch=1 train.seq_len=32 model.layers=2 model.hidden=32 model.ffn_hidden=64 "
    "model.heads=4 model.kv_heads=2 schedule=constant schedule.warmup_steps=0 launch.device=cpu"
).split()
STEPS = 4


def configuration(words: list[str]):
    """A checked configuration."""
    from omegaconf import OmegaConf

    from parallel import compose

    return OmegaConf.to_object(compose.check(compose.compose([*SMALL, *words])[0]))


def trace(cfg, steps: int = STEPS, load: Path | None = None, save: Path | None = None) -> list[list[float]]:
    """Loss, gradient norm before clipping and clip coefficient of some steps that learn random tokens by heart.

    Master weights and moments come from the folder `load`, and after the last step go into the folder `save`.
    """
    from models import loss
    from optim import build, clip
    from parallel import checkpoint_io, checkpoint_state, facts, wrap

    torch.set_num_threads(1)  # on a busy machine threads wait for each other far longer than they compute
    chunks = wrap.model_chunks(cfg, torch.device("cpu"))
    optimizer = build.optimizer(cfg, chunks)
    schedule, clipper = build.schedule(cfg, optimizer), clip.Clipper(cfg, chunks, optimizer)
    wrap.connect(chunks, optimizer, cfg)
    if load:
        checkpoint_io.load(load, checkpoint_state.tensors(chunks, optimizer, cfg))
        checkpoint_state.set_updates(chunks, optimizer, cfg, STEPS)
        checkpoint_state.install_masters(chunks, optimizer, cfg.parallel.zero)
        schedule.num_steps = STEPS
    rank, size = facts.data_rank()
    tokens = np.random.default_rng(0).integers(0, 256, (cfg.train.global_batch, cfg.train.seq_len + 1))
    found = []
    for _ in range(steps):
        schedule.step(1)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        lost = loss.run(chunks, list(tokens[rank::size, None]), cfg.train, backward=True)
        update = clipper.step()
        found.append([lost, update.grad_norm, update.clip_coef])
    if save:
        checkpoint_io.save(save, checkpoint_state.tensors(chunks, optimizer, cfg))
    return found


def main(run_dir: Path) -> None:
    """All cases of the folder."""
    from megatron.core import parallel_state

    from parallel import groups
    from parallel.heartbeat import Heartbeat

    rank, found, grid = int(os.environ["RANK"]), {}, None
    heartbeat = Heartbeat(run_dir, rank)
    for name, words in json.loads((run_dir / "cases.json").read_text()).items():
        heartbeat.beat(name)
        cfg = configuration(words)
        p = cfg.parallel
        if grid is None:
            groups.start(cfg)
        elif grid != (p.tp, p.pp, p.vpp, p.cp):  # its process groups cost threads, so a grid is made once
            parallel_state.destroy_model_parallel()
            groups.grid(cfg)
        grid = p.tp, p.pp, p.vpp, p.cp
        given, saved = (
            folder if folder.exists() else None for folder in (run_dir / "given" / name, run_dir / "saved" / name)
        )
        found[name] = trace(cfg, 0 if given else STEPS, given, saved)
    groups.stop()
    if rank == 0:
        (run_dir / "traces.json").write_text(json.dumps(found))


if __name__ == "__main__":
    from parallel import rank_process

    rank_process.run(main, Path(sys.argv[1]))
