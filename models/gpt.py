"""Megatron-core's GPTModel, built from the configuration. The only place that constructs it."""

from functools import partial

import torch

from conf.schema import Activation, Config, Format, Fp8, Fp8Recipe, Norm, Position, Recompute
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
        **_transformer_engine_fp8(cfg),
    )


def _transformer_engine_fp8(cfg: Config) -> dict:
    n = cfg.precision
    if n.fp8 is not Fp8.transformer_engine:
        return {}
    names = {Fp8Recipe.current: "tensorwise", Fp8Recipe.delayed: "delayed", Fp8Recipe.blockwise: "blockwise"}
    return dict(
        # Blocks are small enough for the range of e4m3, in the backward pass too.
        fp8="e4m3" if n.fp8_recipe is Fp8Recipe.blockwise else "hybrid",
        fp8_recipe=names[n.fp8_recipe],
        # Transformer Engine's own history; Megatron's default is the last step alone.
        fp8_amax_history_len=1024,
        fp8_amax_compute_algo="max",
        first_last_layers_bf16=n.bf16_first_layers + n.bf16_last_layers > 0,
        num_layers_at_start_in_bf16=n.bf16_first_layers,
        num_layers_at_end_in_bf16=n.bf16_last_layers,
    )


def linear_layers(cfg: Config, layer: int):
    """The column- and the row-parallel linear layer of one transformer layer, counted from 0 over the whole model."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    n = cfg.precision
    if n.fp8 is Fp8.transformer_engine:  # which leaves layers in BF16 by itself
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        return TEColumnParallelLinear, TERowParallelLinear
    if n.fp8 is Fp8.emulated and n.bf16_first_layers <= layer < cfg.model.layers - n.bf16_last_layers:
        from precision.fp8_emulated import Fp8ColumnParallelLinear, Fp8RowParallelLinear

        return Fp8ColumnParallelLinear, Fp8RowParallelLinear
    return ColumnParallelLinear, RowParallelLinear


def layer_spec(cfg: Config, layer: int):
    """What transformer layer `layer` is made of: Megatron's own modules, but for norm and core attention."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer import ModuleSpec, TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    norm = norm_layer(cfg)
    column_parallel, row_parallel = linear_layers(cfg, layer)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column_parallel,
                    core_attention=CoreAttention,
                    linear_proj=row_parallel,
                    q_layernorm=IdentityOp,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=partial(
                MLP.as_mlp_submodule,
                submodules=MLPSubmodules(linear_fc1=column_parallel, linear_fc2=row_parallel),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def norm_layer(cfg: Config):
    """The norm in front of attention, MLP and output layer."""
    return RMSNorm if cfg.model.norm is Norm.rmsnorm else LayerNorm


def build(cfg: Config, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None):
    """One model chunk: the layers of this pipeline stage, on this tensor-parallel rank.

    Args:
        pre_process: the chunk holds the input embedding.
        post_process: the chunk holds the output layer and computes the loss.
        vp_stage: number of the virtual stage, None without.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = transformer_config(cfg)
    first, here = get_transformer_layer_offset(config, vp_stage), get_num_layers_to_build(config, vp_stage)
    layers = [layer_spec(cfg, layer) for layer in range(first, first + here)]
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_layer(cfg)),
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
