"""Random small Llamas, as Transformers writes them."""

from pathlib import Path

import torch

SMALL = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=512,
    initializer_range=0.3,
)
LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
# Llama 2's way, and Llama 3.2's: shared keys, tied embeddings, scaled angles; and biases, which some of its kin have.
MODELS = {
    "llama2": dict(rms_norm_eps=1e-5),
    "llama3": dict(
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,
        rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=32.0, **LLAMA3),
    ),
    "biased": dict(num_key_value_heads=4, attention_bias=True, mlp_bias=True),
}


def made(folder: Path, shard: str = "100KB", dtype=torch.float32, **shape):
    """Write a Llama into a folder, in files of at most `shard`; the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SMALL | shape))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # which begin as ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model
