"""Validation: the mean over every held-out token, each counted once, whatever the batches are."""

import numpy as np
import pytest
import torch

from conf.schema import Train
from data.batches import HeldOut, Windows
from data.padding import PADDING
from tracking.metrics import validation


@pytest.mark.parametrize("tokens", [97, 98, 112, 113])
@pytest.mark.parametrize("global_batch, micro_batch, dp", [(4, 4, 1), (4, 1, 2), (6, 3, 2), (8, 1, 8), (16, 2, 1)])
def test_every_held_out_token_is_predicted_once_from_what_stands_before_it(tokens, global_batch, micro_batch, dp):
    train = Train(global_batch=global_batch, micro_batch=micro_batch)
    samples = Windows(np.arange(tokens, dtype=np.uint8), 16, tail=True)
    ranks = [HeldOut(samples, train, rank, dp, "all") for rank in range(dp)]
    batches = [batch for step in range(ranks[0].steps) for rank in ranks for batch in rank.step(step)]
    assert {batch.shape for batch in batches} == {(micro_batch, 17)}
    assert len(batches) * micro_batch < len(samples) + global_batch
    inputs, targets = (np.concatenate(part) for part in zip(*[(b[:, :-1], b[:, 1:]) for b in batches], strict=True))
    counted = targets != PADDING
    assert sorted(targets[counted]) == list(range(1, tokens))
    assert (inputs[counted] == targets[counted] - 1).all()
    for rank in ranks:
        rank.close()


def test_a_bounded_evaluation_takes_the_same_first_sequences_whatever_the_batch_is():
    samples = Windows(np.arange(200, dtype=np.uint8), 16, tail=True)
    for global_batch in (2, 4, 16):
        held_out = HeldOut(samples, Train(global_batch=global_batch, micro_batch=2), 0, 1, 5)
        windows = np.concatenate([batch for step in range(held_out.steps) for batch in held_out.step(step)])
        assert (windows[:5, 0] == np.arange(5) * 16).all() and (windows[5:] == PADDING).all()
        held_out.close()


def test_the_loss_is_the_mean_over_all_held_out_tokens(single_rank, cfg_of):
    from models import loss
    from parallel import wrap

    cfg = cfg_of("model.layers=2", "model.hidden=32", "model.ffn_hidden=64", "model.heads=2", "model.kv_heads=2",
                 "train.seq_len=16", "train.global_batch=4", "train.micro_batch=2", "model.init_std=0.5")  # fmt: skip
    chunks = wrap.model_chunks(cfg, torch.device("cpu"))
    tokens = np.random.default_rng(0).integers(0, 256, 16 * 9 + 7)
    held_out = HeldOut(Windows(tokens, 16, tail=True), cfg.train, 0, 1, "all")
    found = loss.evaluate(chunks, held_out, cfg.train)
    held_out.close()
    each = []
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 16):
            window = torch.from_numpy(tokens[start : start + 17]).unsqueeze(0)
            where = torch.arange(window.shape[1] - 1).unsqueeze(0)
            logits = chunks[0](input_ids=window[:, :-1], position_ids=where, attention_mask=None)
            each += torch.nn.functional.cross_entropy(logits[0].double(), window[0, 1:], reduction="none").tolist()
    assert len(each) == len(tokens) - 1
    assert found == pytest.approx(sum(each) / len(each), rel=1e-7)


def test_perplexity_is_the_exponential_of_the_loss():
    assert validation(0.0) == {"val/loss": 0.0, "val/perplexity": 1.0}
    assert validation(np.log(50.0))["val/perplexity"] == pytest.approx(50)
    assert validation(1e4)["val/perplexity"] == float("inf")
    assert np.isnan(validation(float("nan"))["val/perplexity"])
