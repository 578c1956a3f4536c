"""Matrix products of FP16 tensors on a CPU, computed as a tensor core does: exact products, FP32 sums, one rounding.

PyTorch has no fast FP16 kernel for most CPUs (some forty times slower than FP32), so the product is taken in FP32 from
FP16 inputs and the result is rounded to FP16.
"""

import functools

import torch

_installed = False


def _in_fp32(matmul):
    @functools.wraps(matmul)
    def wrapped(a, b, *, out=None):
        if a.dtype is not torch.float16 or a.device.type != "cpu":
            return matmul(a, b, out=out) if out is not None else matmul(a, b)
        product = matmul(a.float(), b.float()).half()
        return product if out is None else out.copy_(product)

    return wrapped


def install() -> None:
    """Replace `torch.matmul` and `Tensor.matmul`, which are what Megatron's linear layers call. Acts once."""
    global _installed
    if _installed:
        return
    _installed = True
    torch.matmul = _in_fp32(torch.matmul)
    torch.Tensor.matmul = _in_fp32(torch.Tensor.matmul)
    torch.Tensor.__matmul__ = _in_fp32(torch.Tensor.__matmul__)
