"""Models: published sizes, initial weights that no layout changes, attention kernels that agree with the definition."""

import hashlib

import pytest
import torch
from omegaconf import OmegaConf

from conf.schema import Attention, Compute, FlopRule
from models import flops
from models.attention import CoreAttention
from models.init import fill_
from parallel import compose

# Parameters with the vocabulary before padding. Sources: the model cards and papers of each.
PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "gpt3_175b": 174_604_259_328,
    "gpt_1b": 1_315_723_264,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_model_has_its_published_size(name):
    cfg, *_ = compose.compose([f"model={name}"])
    shape = OmegaConf.to_object(cfg.model)
    assert flops.parameters(shape, shape.vocab) == PUBLISHED[name]


def test_arithmetic_counts_what_megatron_builds(single_rank, cfg_of):
    from models import gpt

    for overrides in (
        [],
        [
            "model=gpt_1b",
            "model.layers=2",
            "model.hidden=64",
            "model.ffn_hidden=256",
            "model.heads=4",
            "model.kv_heads=4",
            "model.vocab=300",
        ],
    ):
        cfg = cfg_of(*overrides)
        chunk = gpt.build(cfg)
        assert sum(p.numel() for p in chunk.parameters()) == flops.parameters(cfg.model), overrides


def test_a_token_costs_six_flops_a_parameter_and_attention(cfg_of):
    tiny = cfg_of("model=tiny").model
    matrices = flops.parameters(tiny) - 256 * tiny.hidden  # all but the input embedding
    attention = tiny.layers * tiny.hidden * 256
    assert flops.per_token(tiny, 256, FlopRule.full) == 6 * matrices + 12 * attention
    assert flops.per_token(tiny, 256, FlopRule.causal) == 6 * matrices + 6 * attention


def test_a_part_of_a_weight_is_the_same_part_of_the_whole_weight(cfg_of):
    """Tensor-parallel ranks start from slices of one tensor, also across the blocks it is drawn in."""
    tiny = cfg_of("model=tiny").model
    shape, name = (4099, 520), "decoder.layers.mlp.linear_fc1.weight"
    whole = torch.empty(shape)
    fill_(whole, name, (4, *shape), (2, 0, 0), 1, tiny, seed=7)
    for rows, columns in (
        ((0, 2050), (0, 520)),
        ((2050, 4099), (0, 520)),
        ((0, 4099), (260, 520)),
        ((1999, 2003), (1, 2)),
    ):
        part = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
        fill_(part, name, (4, *shape), (2, rows[0], columns[0]), 1, tiny, seed=7)
        assert torch.equal(part, whole[slice(*rows), slice(*columns)])


def test_weights_depend_on_seed_layer_and_name_and_have_the_stated_spread(cfg_of):
    tiny = cfg_of("model=tiny").model

    def weights(seed=1, layer=0, name="decoder.layers.self_attention.linear_qkv.weight"):
        data = torch.empty(512, 256)
        fill_(data, name, (4, 512, 256), (layer, 0, 0), 1, tiny, seed)
        return data

    base = weights()
    assert torch.equal(base, weights())
    for other in (weights(seed=2), weights(layer=1), weights(name="decoder.layers.mlp.linear_fc1.weight")):
        assert abs(torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1]) < 0.02
    assert abs(base.std() / tiny.init_std - 1) < 0.02
    residual = weights(name="decoder.layers.mlp.linear_fc2.weight")
    assert abs(residual.std() / (tiny.init_std / (2 * tiny.layers) ** 0.5) - 1) < 0.02


def test_initial_weights_have_not_changed(cfg_of):
    """Results of old runs stay comparable only as long as these bytes do."""
    data = torch.empty(64, 32)
    fill_(data, "output_layer.weight", (64, 32), (0, 0), 0, cfg_of("model=tiny").model, seed=1234)
    # The generator's integers are stable between machines; its logarithm may differ in the last bit.
    digest = hashlib.sha256((data * 1e5).round().int().numpy().tobytes()).hexdigest()
    assert digest[:16] == "d69eefac375b171b"


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_kernels_agree_with_the_definition(dtype, tolerance, kv_heads, monkeypatch, single_rank):
    class Config:
        attention_dropout, sequence_parallel = 0.0, False

    torch.manual_seed(0)
    query = torch.randn(33, 2, 8, 16).to(dtype)
    key, value = torch.randn(2, 33, 2, kv_heads, 16).to(dtype)
    outputs, gradients = [], []
    for kind in (Attention.math, Attention.sdpa):
        monkeypatch.setattr(CoreAttention, "kind", kind)
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        output = CoreAttention(Config, 1, None, "self")(*inputs, None)
        output.float().square().sum().backward()
        outputs.append(output.float())
        gradients.append([x.grad.float() for x in inputs])
    assert outputs[0].shape == (33, 2, 8 * 16)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=tolerance, atol=tolerance)
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        assert (found - expected).norm() / expected.norm() < 4 * tolerance


def test_attention_does_not_look_ahead(monkeypatch, single_rank):
    class Config:
        attention_dropout, sequence_parallel = 0.0, False

    monkeypatch.setattr(CoreAttention, "kind", Attention.sdpa)
    attend = CoreAttention(Config, 1, None, "self")
    query, key, value = torch.randn(3, 10, 1, 2, 8)
    before = attend(query, key, value, None)
    key[6:], value[6:] = 100.0, 100.0
    after = attend(query, key, value, None)
    assert torch.equal(before[:6], after[:6]) and not torch.equal(before[6:], after[6:])


def test_flash_attn_without_a_gpu_is_refused_with_the_reason():
    from models.attention import choose

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(RuntimeError, match="no GPU.*model.attention=sdpa"):
        choose(Attention.flash_attn, Compute.bf16)
    assert choose(Attention.auto, Compute.bf16)[0] is Attention.sdpa


def test_a_model_too_large_for_this_machine_is_refused_before_it_starts(train, tmp_path):
    done = train("model=llama2_13b", "parallel=tp4_pp2", "precision=bf16", "clip=0.1")
    assert done.returncode == 2
    assert "needs 218 GiB for weights, gradients and optimizer state" in done.stderr and "model=tiny" in done.stderr
    assert not (tmp_path / "runs").exists()
