"""Context parallelism: the sequence is split among ranks, and attention gathers the keys and values it needs.

With a causal mask late positions cost more than early ones, so the sequence is cut into 2·cp chunks and rank r holds
chunks r and 2·cp-1-r: every rank does the same work (the order Megatron-core's rotary embedding expects, too).
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


def size() -> int:
    """Ranks that share a sequence."""
    return parallel_state.get_context_parallel_world_size()


def chunks_of(rank: int) -> tuple[int, int]:
    """The two chunks that context-parallel rank `rank` holds, of 2·cp."""
    return rank, 2 * size() - 1 - rank


def here() -> tuple[int, int]:
    """The two chunks that this rank holds."""
    return chunks_of(parallel_state.get_context_parallel_rank())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The columns of `[batch, seq]` that this rank holds, `[batch, seq / cp]`."""
    if size() == 1:
        return tensor
    parts = tensor.chunk(2 * size(), dim=1)
    return torch.cat([parts[chunk] for chunk in here()], dim=1)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`[seq / cp, ...]` of all ranks in order, `[seq, ...]`; gradients flow back to the rank that owns each part."""
    gathered = gather_from_sequence_parallel_region(tensor, group=parallel_state.get_context_parallel_group())
    parts = gathered.chunk(2 * size())
    held = [chunk for rank in range(size()) for chunk in chunks_of(rank)]
    return torch.cat([parts[held.index(chunk)] for chunk in range(2 * size())])
