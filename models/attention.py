"""Core attention: softmax(QK^T)V with a causal mask, by PyTorch's kernels, flash-attn, or plain matrix products.

Megatron-core's `DotProductAttention` builds the whole score matrix and a mask tensor. The kernels here need neither.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from conf.schema import Attention, Compute
from models import context


def choose(kind: Attention, compute: Compute) -> tuple[Attention, str]:
    """The kernel that `model.attention` stands for on this machine in this format, and the reason in words.

    Raises:
        RuntimeError: if flash_attn is asked for where it cannot run.
    """
    if kind not in (Attention.auto, Attention.flash_attn):
        return kind, "as asked for"
    missing = _flash_attn_missing(compute)
    if kind is Attention.flash_attn and missing:
        raise RuntimeError(f"model.attention=flash_attn cannot be used: {missing}; use model.attention=sdpa.")
    if missing:
        return Attention.sdpa, f"PyTorch's own kernels, because {missing}"
    return Attention.flash_attn, "the package and a GPU are there"


def _flash_attn_missing(compute: Compute) -> str | None:
    if not torch.cuda.is_available():
        return "there is no GPU for flash-attn"
    if compute not in (Compute.bf16, Compute.fp16, Compute.fp8):  # attention is no linear layer and stays in BF16
        return f"flash-attn computes in BF16 and FP16 only, not in {compute.value.upper()}"
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return "the package flash-attn is not installed"
    return None


def install(kind: Attention, compute: Compute) -> str:
    """Choose the kernel for every model that this process builds; returns the choice and its reason in words."""
    CoreAttention.kind, reason = choose(kind, compute)
    return f"{CoreAttention.kind.value} ({reason})"


class CoreAttention(torch.nn.Module):
    """Causal self-attention over the heads that this rank holds; takes the place of Megatron's core attention."""

    kind = Attention.sdpa

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
    ):
        super().__init__()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.sequence_parallel = config.sequence_parallel

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, **kwargs):
        """Attend.

        Args:
            query: `[seq, batch, heads, head_dim]`; with context parallelism the part of the sequence held here.
            key, value: `[seq, batch, kv_heads, head_dim]`, likewise; each is shared by heads / kv_heads query heads.
            attention_mask: must be None, the mask is causal.

        Returns:
            `[seq, batch, heads * head_dim]`.
        """
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks hold different heads and need different masks. With sequence parallelism Megatron has
        # switched generators already.
        own_generator = get_cuda_rng_tracker().fork() if dropout and not self.sequence_parallel else nullcontext()
        with own_generator:
            out = self._attend(query, key, value, dropout)
        return out.reshape(*query.shape[:2], -1)

    def _attend(self, query, key, value, dropout: float):
        kernel = _KERNELS[self.kind]
        if context.size() == 1:
            return kernel(query, key, value, dropout, self.scale)
        key, value = context.whole(key), context.whole(value)
        queries = query.chunk(2)
        seen = [(chunk + 1) * len(queries[0]) for chunk in context.here()]
        parts = [kernel(q, key[:end], value[:end], dropout, self.scale) for q, end in zip(queries, seen, strict=True)]
        return torch.cat(parts)


def _flash(query, key, value, dropout: float, scale: float | None):
    """The package flash-attn."""
    from flash_attn import flash_attn_func

    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    return flash_attn_func(q, k, v, dropout_p=dropout, softmax_scale=scale, causal=True).transpose(0, 1)


def _sdpa(query, key, value, dropout: float, scale: float | None):
    """PyTorch's kernels."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    grouped, (rows, columns) = q.shape[1] != k.shape[1], (q.shape[2], k.shape[2])
    # PyTorch's own causal mask begins at the first key; the last query has to see the last key.
    mask = None if rows == columns else _visible(rows, columns, q.device)
    # A CPU has no fast FP16 kernel: compute in FP32 from FP16 inputs and round, as a tensor core does.
    half_on_cpu = q.dtype is torch.float16 and q.device.type == "cpu"
    if half_on_cpu:
        q, k, v = q.float(), k.float(), v.float()
    out = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )  # fmt: skip
    return (out.half() if half_on_cpu else out).permute(2, 0, 1, 3)


def _math(query, key, value, dropout: float, scale: float | None):
    """The definition, with softmax in FP32: the reference for the other kernels."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    visible = _visible(q.shape[2], k.shape[2], q.device)
    weights = F.dropout(scores.masked_fill(~visible, float("-inf")).softmax(-1).to(v.dtype), dropout)
    return torch.matmul(weights, v).permute(2, 0, 1, 3)


def _visible(queries: int, keys: int, device) -> torch.Tensor:
    """Which keys each query sees, `[queries, keys]`; the queries are the last positions of the keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


# Each takes and returns `[seq, batch, heads, dim]`; queries are the last positions of the keys.
_KERNELS = {Attention.sdpa: _sdpa, Attention.flash_attn: _flash, Attention.math: _math}
