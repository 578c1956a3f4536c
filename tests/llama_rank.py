"""A rank that computes logits and text of imported models, under one layout after the other in the same processes."""

import os
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf

from parallel import rank_process
from parallel.frozen import load
from parallel.heartbeat import Heartbeat

# Long enough for scaled rotary angles to tell.
PROMPT = torch.randint(300, [300], generator=torch.Generator().manual_seed(1)).tolist()
COUNT = 24


def outcome(weights: Path, window: int, *words: str) -> dict:
    """What a checkpoint computes: logits of the prompt, the likeliest tokens with and without cache, drawn ones."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from models import decode
    from models.sampling import Sampling
    from parallel import compose, wrap

    words = ["model=from_checkpoint", f"model.weights={weights}", "train.global_batch=1", "train.micro_batch=1", *words]
    cfg = OmegaConf.to_object(compose.check(compose.compose(["launch.device=cpu", "data=mock", *words])[0], world=None))
    chunks = wrap.bare_chunks(cfg)
    tokens = torch.tensor([PROMPT])

    def forward(_, model):
        return model(input_ids=tokens, position_ids=torch.arange(len(PROMPT))[None], attention_mask=None), None

    def text(how: Sampling, cached: bool, window: int = window) -> list[int]:
        return list(decode.continued(chunks, PROMPT, COUNT, window, cfg.model.vocab, how, cached))

    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        outputs = decode._through(chunks, forward, len(PROMPT))
        logits = gather_from_tensor_model_parallel_region(outputs[0])[0, :, : cfg.model.vocab] if outputs else None
    return {
        "logits": logits,
        "greedy": text(Sampling(), cached=True),
        "greedy without cache": text(Sampling(), cached=False),
        "drawn": text(Sampling(0.7, 20, 0.9), cached=True),
        "short window": text(Sampling(), True, 12),
        "short window without cache": text(Sampling(), False, 12),
    }


def main(run_dir: Path, *names: str) -> None:
    """Write `LAYOUT.pt` for each layout, from its last rank: the outcome of each checkpoint."""
    from megatron.core import parallel_state

    from parallel import compose, groups, quiet

    quiet.libraries()
    heartbeat = Heartbeat(run_dir, int(os.environ["RANK"]))
    groups.start(load(run_dir).cfg)
    for layout in ("tp2", "pp2"):
        heartbeat.beat(layout)
        parallel = compose.compose([f"parallel={layout}"])[0].parallel
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(parallel.tp, parallel.pp, create_gloo_process_groups=False)
        found = {name: outcome(Path(name), 512, f"parallel={layout}") for name in names}
        if os.environ["RANK"] == "1":
            torch.save(found, run_dir / f"{layout}.pt")
    groups.stop()


if __name__ == "__main__":
    rank_process.run(main, Path(sys.argv[1]), *sys.argv[2:])
