"""Forward and backward pass over a global batch by Megatron's pipeline schedule, and the loss that all agree on."""

import contextlib
import functools
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from conf.schema import Train
from data.batches import HeldOut
from data.padding import PADDING
from models import context
from parallel.groups import from_last_stage


def positions(seq_len: int) -> torch.Tensor:
    """Positions that this rank holds of a sequence, `[1, seq / cp]`."""
    return _positions(seq_len, context.size(), parallel_state.get_context_parallel_rank())


@functools.cache
def _positions(seq_len: int, cp: int, cp_rank: int) -> torch.Tensor:
    return context.local(torch.arange(seq_len, device="cuda").unsqueeze(0))


def _token_losses(tokens, model):
    """One micro-batch `[batch, seq_len + 1]` through one chunk; the last chunk's output is the loss of each token."""
    inputs, labels = (context.local(part).contiguous() for part in (tokens[:, :-1], tokens[:, 1:]))
    where = positions(tokens.shape[1] - 1)
    return model(input_ids=inputs, position_ids=where, attention_mask=None, labels=labels)


def _training(micro_batches, model):
    return _token_losses(next(micro_batches), model), _mean


def _mean(token_losses: torch.Tensor):
    loss = token_losses.float().mean()
    # Of the mean over the global batch this micro-batch has one part in micro-batches × ranks that read different
    # tokens. Divided here, and added up by the reduction (parallel.wrap), gradients are as large under every layout; an
    # average would let FP16 overflow at another loss scale on two ranks than on one. The schedule multiplies what it is
    # given by the context-parallel size and divides it by the number of micro-batches, in place: hence the copy.
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return loss / (ranks * context.size()), loss.detach().clone()


def _validation(micro_batches, model):
    tokens = next(micro_batches)
    counted = context.local(tokens[:, 1:] != PADDING)
    # Padding stands behind the text, where a causal model does not see it; any token will do.
    return _token_losses(tokens.clamp(min=0), model), functools.partial(_sum, counted=counted)


def _sum(token_losses: torch.Tensor, counted: torch.Tensor):
    total = torch.where(counted, token_losses.double(), 0.0).sum()
    return total, torch.stack([total, counted.sum()])


def run(chunks, micro_batches: list[np.ndarray], train: Train, backward: bool) -> float:
    """Pass this rank's micro-batches through the pipeline.

    Args:
        micro_batches: each `[micro_batch, seq_len + 1]` token ids.
        backward: accumulate gradients and reduce them among the data-parallel ranks.

    Returns:
        Mean loss over the tokens of the global batch, in nats; the same on every rank.
    """
    losses = _schedule(chunks, micro_batches, train, _training, forward_only=not backward)
    if not losses:  # not the last pipeline stage
        return from_last_stage(0.0)
    loss = torch.stack(losses).mean()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(loss, group=group)
        loss /= group.size()
    return from_last_stage(loss.item())


def _schedule(chunks, micro_batches: list[np.ndarray], train: Train, step, forward_only: bool) -> list[torch.Tensor]:
    """Megatron's schedule over this rank's micro-batches; what the last stage found in each, nothing on the others."""
    tensors = [_on_device(batch) for batch in micro_batches]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(tensors) for _ in chunks] if len(chunks) > 1 else iter(tensors),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(tensors),
        seq_length=train.seq_len,
        micro_batch_size=train.micro_batch,
        forward_only=forward_only,
    )


def _on_device(batch: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(batch)
    return tensor.pin_memory().to("cuda", non_blocking=True)


@torch.no_grad()
def evaluate(chunks, held_out: HeldOut, train: Train, before: Callable[[int], None] = lambda batch: None) -> float:
    """Mean loss over every token of the held-out samples, in nats; every rank must call it and gets the same.

    Each token weighs the same wherever it stands, in a batch that is not full too, so the figure does not depend on
    layout, micro-batch or global batch. `before(i)` is called before batch i.
    """
    total = torch.zeros(2, dtype=torch.float64, device="cuda")
    with evaluating(chunks):
        for i in range(held_out.steps):
            before(i)
            for found in _schedule(chunks, held_out.step(i), train, _validation, forward_only=True):
                total += found
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return from_last_stage((total[0] / total[1]).item())


@contextlib.contextmanager
def weights_complete(chunks):
    """For passes outside of a training step.

    With overlapped gathering, DDP fetches weights in hooks of the forward pass and expects a training step around
    them; outside of one they are gathered at once and the hooks are off.
    """
    hooked = [c for c in chunks if getattr(c, "use_forward_hook", False) and c.remove_forward_pre_hook_handles]
    for chunk in hooked:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


@contextlib.contextmanager
def evaluating(chunks):
    """Within it the chunks are in evaluation mode, with weights that are complete."""
    with weights_complete(chunks):
        for chunk in chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in chunks:
                chunk.train()
