"""Which of the bytes that are alive are weights, gradients, master weights, moments or buffers."""

import torch

from planner.recorder import Recorder


def mark_model(recorder: Recorder, chunks, optimizer) -> None:
    """Name the storages of weights, gradients, master weights and buffers once model and optimizer are built."""
    for chunk in chunks:
        if isinstance(chunk.buffers, list):  # Megatron's DDP
            recorder.relabel([buffer.grad_data for buffer in chunk.buffers], "gradients")
        else:
            for group in chunk.module.param_and_grad_buffer.parameter_groups:
                for buffer, kind in (
                    (group.model_weight_buffer, "parameters"),
                    (group.main_weight_buffer, "master weights"),
                    (group.main_grad_buffer, "gradients"),
                ):
                    if buffer is not None and buffer.data is not None:
                        recorder.relabel([buffer.data], kind)
        recorder.relabel([_local(p.data) for p in chunk.parameters()], "parameters")
        recorder.relabel(list(chunk.module.buffers()), "buffers")
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            recorder.relabel([_local(p.data) for p in group["params"]], "master weights")


def mark_optimizer(recorder: Recorder, optimizer) -> None:
    """Name the storages that the first step made: moments."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            recorder.relabel([_local(v) for v in state.values() if isinstance(v, torch.Tensor)], "moments")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's own part."""
    return getattr(tensor, "_local_tensor", tensor)
