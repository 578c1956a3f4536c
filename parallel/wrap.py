"""Build this rank's model chunks and wrap them for data parallelism: Megatron's DDP, or Megatron-FSDP for ZeRO-2/3."""

import copy

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.transformer.module import Float16Module

from conf.schema import Config, Format
from models import gpt, init
from parallel import checkpoint_map, checkpoint_weights
from precision import no_masters

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def model_chunks(cfg: Config, device: torch.device) -> list[torch.nn.Module]:
    """The chunks of this rank, wrapped for data parallelism: one, or one for each virtual pipeline stage."""
    return [wrap(cfg, chunk, device, is_first=i == 0) for i, chunk in enumerate(bare_chunks(cfg))]


def bare_chunks(cfg: Config) -> list[torch.nn.Module]:
    """The chunks of this rank with their first weights, not wrapped yet. Every rank must call it."""
    chunks = []
    for stage in range(cfg.parallel.vpp):
        stage = stage if cfg.parallel.vpp > 1 else None
        where = dict(ignore_virtual=False, vp_stage=stage)
        first, last = parallel_state.is_pipeline_first_stage(**where), parallel_state.is_pipeline_last_stage(**where)
        chunk = gpt.build(cfg, pre_process=first, post_process=last, vp_stage=stage)
        if cfg.model.weights is None:
            init.initialize(chunk, cfg.model, cfg.train.seed)
        checkpoint_map.attach_places(chunk)
        if cfg.precision.params is not Format.fp32:
            chunk = Float16Module(chunk.config, chunk)
        chunks.append(chunk)
    if cfg.model.weights is not None:
        checkpoint_weights.load(cfg.model.weights, chunks)
    return chunks


def wrap(cfg: Config, chunk: torch.nn.Module, device: torch.device, is_first: bool) -> torch.nn.Module:
    """Wrap one chunk. Only the first chunk of a rank is cut into buckets: the others are off the critical path."""
    # Gradients are added up, not averaged: models/loss.py divides. This is what Megatron calls the switch for it.
    adding = copy.copy(chunk.config)
    adding.calculate_per_token_loss = True
    wrapped = _wrapped(cfg, adding, chunk, device, is_first)
    wrapped.config = chunk.config
    return wrapped


def _wrapped(cfg: Config, config, chunk: torch.nn.Module, device: torch.device, is_first: bool) -> torch.nn.Module:
    p, ddp, layout = cfg.parallel, ddp_config(cfg), None
    if p.zero >= 2:
        from parallel.zero import StageFSDP, allow_fp16

        allow_fp16()
        return StageFSDP(config, ddp, chunk, disable_bucketing=not is_first, device=_as_cuda(device))
    if p.zero == 1:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # The first pipeline stage alone communicates in buckets, as Megatron's DDP does.
        bucketed = is_first and p.overlap and parallel_state.is_pipeline_first_stage()
        layout = DistributedOptimizer.compute_full_param_layout(
            [q for q in chunk.parameters() if q.requires_grad],
            (ddp.bucket_size or max(40_000_000, 1_000_000 * group.size())) if bucketed else None,
            group.size(),
            ddp,
            expert_data_parallel_world_size=group.size(),
        )
    return DistributedDataParallel(config, ddp, chunk, disable_bucketing=not is_first, full_param_layout=layout)


def _as_cuda(device: torch.device) -> torch.device:
    """Megatron-FSDP compares its device with CUDA's current one, under the CPU stand-in too."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cpu" else device


def ddp_config(cfg: Config) -> DistributedDataParallelConfig:
    """Megatron's data-parallel configuration for this point."""
    p, dtype = cfg.parallel, gpt.DTYPES[cfg.precision.grad_reduce]
    bucket = None
    if p.bucket_mb is not None:
        bucket = max(1, int(p.bucket_mb * 2**20 / dtype.itemsize))
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=cfg.precision.grad_reduce is Format.fp32,
        overlap_grad_reduce=p.overlap,
        overlap_param_gather=p.overlap and p.zero >= 1,
        use_distributed_optimizer=p.zero >= 1,
        bucket_size=bucket,
        use_megatron_fsdp=p.zero >= 2,
        data_parallel_sharding_strategy=SHARDING.get(p.zero, "no_shard"),
        # Without these two, ZeRO-2/3 would reduce in the compute format and differ from DDP in BF16.
        megatron_fsdp_main_grads_dtype=dtype,
        megatron_fsdp_grad_comm_dtype=dtype,
        megatron_fsdp_main_params_dtype=None if no_masters.chosen(cfg) else torch.float32,
        # Needs PREMUL_SUM, which gloo lacks; a division beforehand gives the same sum.
        gradient_reduce_div_fusion=torch.cuda.is_available(),
    )


def connect(chunks: list[torch.nn.Module], optimizer, cfg: Config) -> None:
    """Tell the pipeline schedule how to scale the loss and when to communicate gradients and weights."""
    config = chunks[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if cfg.parallel.overlap:
        single = len(chunks) == 1
        pick = (lambda calls: calls[0]) if single else (lambda calls: calls)
        config.no_sync_func = pick([chunk.no_sync for chunk in chunks])
        if not single:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
            if cfg.parallel.zero >= 1:
                config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
