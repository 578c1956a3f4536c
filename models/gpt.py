"""Megatron-core's GPTModel, built from the configuration. The only place that constructs it."""

from functools import partial

import torch

from conf.schema import Activation, Config, Format, Norm, Position, Recompute
from models.attention import CoreAttention
from models.norm import LayerNorm, RMSNorm
from parallel.resolve import padded_vocab

DTYPES = {Format.fp32: torch.float32, Format.bf16: torch.bfloat16, Format.fp16: torch.float16}


def transformer_config(cfg: Config):
    """Megatron's TransformerConfig for this point. Every choice is made here; nothing is changed afterwards."""
    from megatron.core.transformer import TransformerConfig

    m, p = cfg.model, cfg.parallel
    swiglu = m.activation is Activation.swiglu
    dtype = DTYPES[cfg.precision.params]
    recompute = {}
    if p.recompute is Recompute.full:
        recompute = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif p.recompute is Recompute.selective:
        recompute = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    return TransformerConfig(
        num_layers=m.layers,
        hidden_size=m.hidden,
        ffn_hidden_size=m.ffn_hidden,
        num_attention_heads=m.heads,
        num_query_groups=m.kv_heads,
        kv_channels=m.hidden // m.heads,
        normalization="RMSNorm" if m.norm is Norm.rmsnorm else "LayerNorm",
        layernorm_epsilon=m.norm_eps,
        gated_linear_unit=swiglu,
        activation_func=torch.nn.functional.silu if swiglu else torch.nn.functional.gelu,
        add_bias_linear=m.bias,
        hidden_dropout=m.dropout,
        attention_dropout=m.dropout,
        # Weights are written by models/init.py, as a function of seed, name and global shape.
        perform_initialization=False,
        init_method_std=m.init_std,
        # The scale of logits. Attention keeps 1/sqrt(head size): widths differ in the number of heads.
        use_mup=m.mup,
        mup_base_hidden_size=m.mup_base_hidden if m.mup else None,
        mup_attn_scale_power=0.5,
        params_dtype=dtype,
        fp16=cfg.precision.params is Format.fp16,
        bf16=cfg.precision.params is Format.bf16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        sequence_parallel=p.sequence_parallel,
        # Megatron-FSDP's hooks hand out a view of a stage's output, which must not be freed.
        deallocate_pipeline_outputs=p.pp > 1 and p.zero < 2,
        # With two stages the next one is also the previous one, and batched sends of activations and gradients would
        # be received in each other's place; the unbatched order is safe. The interleaved schedule sends both ways.
        overlap_p2p_comm=p.vpp > 1,
        batch_p2p_comm=p.vpp == 1,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        **recompute,
    )


def block_spec(cfg: Config, num_layers: int):
    """What `num_layers` transformer layers are made of: Megatron's own modules, but for norm and core attention."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import ModuleSpec, TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    norm = RMSNorm if cfg.model.norm is Norm.rmsnorm else LayerNorm
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=CoreAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=IdentityOp,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=partial(
                MLP.as_mlp_submodule,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def build(cfg: Config, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None):
    """One model chunk: the layers of this pipeline stage, on this tensor-parallel rank.

    Args:
        pre_process: the chunk holds the input embedding.
        post_process: the chunk holds the output layer and computes the loss.
        vp_stage: number of the virtual stage, None without.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    config = transformer_config(cfg)
    return GPTModel(
        config=config,
        transformer_layer_spec=block_spec(cfg, get_num_layers_to_build(config, vp_stage)),
        vocab_size=padded_vocab(cfg.model),
        max_sequence_length=cfg.model.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=cfg.model.tie_embeddings,
        position_embedding_type="rope" if cfg.model.position is Position.rope else "learned_absolute",
        rotary_base=cfg.model.rope_base,
        rope_scaling=cfg.model.rope_factor != 1,
        rope_scaling_factor=cfg.model.rope_factor,
        vp_stage=vp_stage,
    )
