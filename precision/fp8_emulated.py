"""FP8 products without a device that has them: inputs are rounded through PyTorch's FP8 formats, products are BF16's.

What training sees is that of Transformer Engine's current scaling (Micikevicius et al. 2022): inputs and weights of the
layers' matrix products in e4m3, gradients that come back in e5m2, each tensor scaled so that its largest element is
near the format's largest. Scales are powers of two, which BF16 multiplies by without an error of its own. The largest
element is that of the whole tensor, over tensor- and context-parallel ranks, so that layouts agree.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(tensor: torch.Tensor, format: torch.dtype) -> torch.Tensor:
    """The tensor as FP8 holds it under its present scale, in its own dtype. All ranks of a layer must call it."""
    largest = tensor.detach().abs().amax().float()
    group = parallel_state.get_tensor_and_context_parallel_group()
    if group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exponent = torch.floor(torch.log2(torch.finfo(format).max / largest))
    # A tensor of zeros needs no scale. NaN and infinity stay what they are and show in the product.
    scale = torch.exp2(torch.where(largest > 0, exponent.clamp(-120, 120), 0.0)).to(tensor.dtype)
    return (tensor * scale).to(format).to(tensor.dtype) / scale


class _RoundForward(torch.autograd.Function):
    """Rounds what goes forward; the gradient passes."""

    @staticmethod
    def forward(ctx, tensor):
        return rounded(tensor, FORWARD)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _RoundBackward(torch.autograd.Function):
    """Rounds the gradient that comes back; what goes forward passes."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return rounded(gradient, BACKWARD)


class _Fp8:
    def _forward_impl(self, input, weight, bias=None, **kwargs):
        inputs = _RoundForward.apply(input), _RoundForward.apply(weight)
        output = _RoundBackward.apply(super()._forward_impl(*inputs, bias=None, **kwargs))
        return output if bias is None else output + bias


class Fp8ColumnParallelLinear(_Fp8, ColumnParallelLinear):
    """Megatron's column-parallel layer with the three products of a step taken in emulated FP8."""


class Fp8RowParallelLinear(_Fp8, RowParallelLinear):
    """Megatron's row-parallel layer with the three products of a step taken in emulated FP8."""
