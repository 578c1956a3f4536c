"""Process groups of one rank: the world, then Megatron's grid of TP × CP × DP × PP."""

import datetime
import os

import torch
import torch.distributed as dist

from conf.schema import Config, Device


def start(cfg: Config) -> torch.device:
    """Pick this rank's device, join the world, build the grid.

    GPUs talk through NCCL, one device a rank; CPUs through gloo, with Megatron-core's CUDA names meaning the CPU.

    Raises:
        RuntimeError: if the GPU this rank should take is not there.
    """
    device = _device(cfg)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=cfg.launch.collective_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    grid(cfg)
    return device


def grid(cfg: Config) -> None:
    """Cut the world, which has been joined, into Megatron's grid, and seed this rank's generators."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    p = cfg.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=cfg.launch.collective_timeout_s / 60,
    )
    model_parallel_cuda_manual_seed(cfg.train.seed)


def _device(cfg: Config) -> torch.device:
    if cfg.launch.device is Device.cpu:
        from parallel import cpu_as_cuda

        cpu_as_cuda.install()
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() == 1:
        local_rank = 0  # SLURM can show each task of a node its own GPU only
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"Rank {os.environ['RANK']} needs GPU {local_rank} but PyTorch sees {torch.cuda.device_count()}; "
            "use launch.device=cpu or a smaller layout."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def stop() -> None:
    """Leave the world. Only after success: after an error the others may hang in a collective."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def from_last_stage(value: float) -> float:
    """A number known to the last pipeline stage, given to all stages of its pipeline."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device="cuda")
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(tensor, source, parallel_state.get_pipeline_model_parallel_group())
    return tensor.item()
