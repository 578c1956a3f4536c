"""The kernels that a GPU runs where a CPU runs others: flash attention, a fused norm, one kernel for the update.

A dry run has its tensors on the CPU. Where the plan is for GPUs, these take the place of the CPU's own, with the same
memory kept for the backward pass and the same bytes moved as the GPU's.
"""

import contextlib

import torch

from conf.schema import Attention
from models import attention, norm


@contextlib.contextmanager
def used(on_gpu: bool):
    """Within it the model computes with a GPU's kernels."""
    if not on_gpu:
        yield
        return
    kernels, rms = dict(attention._KERNELS), norm.RMSNorm.forward
    attention._KERNELS[Attention.sdpa] = attention._KERNELS[Attention.flash_attn] = _flash
    norm.RMSNorm.forward = lambda self, x: _RMSNorm.apply(x, self.weight)
    try:
        yield
    finally:
        attention._KERNELS.update(kernels)
        norm.RMSNorm.forward = rms


def fuse(optimizer, on_gpu: bool) -> None:
    """On GPUs Megatron takes a fused Adam (Transformer Engine's, or apex's): one pass, nothing temporary."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]) if on_gpu else []:
        if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def _flash(query, key, value, dropout: float, scale: float | None):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, True, scale=scale)[0]
    return out.permute(2, 0, 1, 3)


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and one number a row; each product below stands for the kernel that moves the same bytes."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return gradient * x, torch.empty_like(weight)
