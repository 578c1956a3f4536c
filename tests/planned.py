"""What the planner says of several points, in one process, as JSON on stdout."""

import json
import sys

from parallel import quiet

quiet.libraries()

from planner import dry_run, plan, points, profile  # noqa: E402

SHAPE = (
    "model=tiny model.layers=8 data=mock train.micro_batch=1 train.global_batch=24 precision=bf16 cluster=a100_80g_x8"
)
LAYOUTS = ["parallel=pp2", "parallel=tp2_sp parallel.recompute=full", "parallel=pp2_vpp2 model.layers=16"]


def scaled(words: str) -> dict:
    """A deep model from dry runs of two depths and few micro-batches, and the dry run of the whole step."""
    cfg = points.config([*SHAPE.split(), *words.split()])
    stage = cfg.parallel.pp - 1
    short = profile.of(cfg, stage)
    segments = dry_run.rank(cfg, short.rank, profile.micro_batches(cfg)).segments
    return {
        "peak": [short.peak[1].peak, max(s.peak for s in segments.values())],
        "state": [short.state, profile.state(segments)],
        "flops": [
            {kind: short.typical(kind, 0).flops for kind in ("forward", "backward")},
            {
                kind: sum(op.flops * n for op, n in segments[f"{kind}/0/1"].ops.items())
                for kind in ("forward", "backward")
            },
        ],
    }


def planned(words: str) -> dict:
    """A plan as plain values, and the arithmetic's figure for its model state."""
    from models import flops
    from parallel import memory

    cfg = points.config(words.split())
    found = plan.of(cfg).plain()
    share = flops.parameters(cfg.model) / (cfg.parallel.tp * cfg.parallel.pp)
    return found | {"state_by_formula": memory.state_gib(cfg, share) * 2**30}


json.dump(
    {
        "scaled": {words: scaled(words) for words in LAYOUTS},
        "13b": planned("experiment=llama2_13b_tp4_pp2 cluster=a100_80g_x8 parallel.sequence_parallel=true"),
        "175b": planned(
            "model=gpt3_175b parallel.tp=8 precision=bf16 data=mock train.seq_len=2048 cluster=a100_40g_x8"
        ),
    },
    sys.stdout,
)
