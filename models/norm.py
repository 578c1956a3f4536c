"""RMSNorm and LayerNorm for Megatron-core layers without Transformer Engine or apex.

Megatron-core's own fallback refuses sequence parallelism. What that takes is a mark on the weights: each rank sees
only its part of the sequence, so `finalize_model_grads` has to add the norm's gradients over the tensor-parallel ranks.
"""

import torch


def _mark(norm: torch.nn.Module, config) -> None:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square norm over the last dimension of `[seq, batch, hidden]` (Zhang & Sennrich 2019)."""

    def __init__(self, config, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        _mark(self, config)


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm over the last dimension of `[seq, batch, hidden]` (Ba et al. 2016)."""

    def __init__(self, config, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        _mark(self, config)
