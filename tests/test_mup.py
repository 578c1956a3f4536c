"""Maximal update parametrisation: what a step changes does not depend on the width, so a learning rate carries over."""

import pytest
import torch


def trained(cfg_of, hidden: int, *words: str, steps: int = 4) -> tuple[list[float], torch.Tensor]:
    """Losses of a few steps of a model of this width, and how much they moved the last layer's output, on average."""
    from data.batches import Batches, Mock
    from models import loss
    from optim import build, clip
    from parallel import wrap

    heads = hidden // 16
    shape = f"model.hidden={hidden} model.heads={heads} model.kv_heads={heads} model.ffn_hidden={2 * hidden}"
    lengths = "model.layers=2 train.steps=8 train.global_batch=4 train.micro_batch=4 train.seq_len=32"
    cfg = cfg_of(*shape.split(), *lengths.split(), "schedule=constant", "schedule.warmup_steps=0", "clip=none", *words)
    chunks = wrap.model_chunks(cfg, torch.device("cpu"))
    optimizer = build.optimizer(cfg, chunks)
    schedule = build.schedule(cfg, optimizer)
    clipper = clip.Clipper(cfg, chunks, optimizer)
    wrap.connect(chunks, optimizer, cfg)
    batches = Batches(Mock(cfg.model.vocab, cfg.train.seq_len, stream=2), cfg.train, 0, 1, None)
    seen = []
    last = chunks[0].module.decoder.layers[-1]
    last.register_forward_hook(lambda module, inputs, output: seen.append(output[0].detach().clone()))
    losses = []
    for _ in range(steps):
        micro_batches = batches.step(0)  # the same every time, so that outputs can be compared
        schedule.step(1)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(loss.run(chunks, micro_batches, cfg.train, backward=True))
        clipper.step()
    batches.close()
    return losses, (seen[-1] - seen[0]).abs().mean()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_at_the_base_width_nothing_changes(cfg_of, single_rank, optimizer):
    plain, _ = trained(cfg_of, 64, f"optimizer={optimizer}")
    scaled, _ = trained(cfg_of, 64, f"optimizer={optimizer}", "model.mup=true", "model.mup_base_hidden=64")
    assert scaled == plain


def test_a_step_moves_outputs_as_much_in_a_wide_model_as_in_a_narrow_one(cfg_of, single_rank):
    """And without the parametrisation it moves them more, the wider the model is."""
    mup = ["model.mup=true", "model.mup_base_hidden=32", "optimizer.lr=3e-3"]
    _, narrow = trained(cfg_of, 32, *mup)
    _, wide = trained(cfg_of, 512, *mup)
    _, wide_without = trained(cfg_of, 512, "optimizer.lr=3e-3")
    assert 0.67 < wide / narrow < 1.5
    assert wide_without / narrow > 3
