"""Forward and backward pass over a global batch by Megatron's pipeline schedule, and the loss that all agree on."""

import functools

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from conf.schema import Train
from models import context
from parallel.groups import from_last_stage


@functools.cache
def positions(seq_len: int) -> torch.Tensor:
    """Positions that this rank holds of a sequence, `[1, seq / cp]`."""
    return context.local(torch.arange(seq_len, device="cuda").unsqueeze(0))


def _forward(micro_batches, model):
    """One micro-batch through one chunk; the last chunk's output is the loss of each token, `[batch, seq]`."""
    tokens = next(micro_batches)
    inputs, labels = (context.local(part).contiguous() for part in (tokens[:, :-1], tokens[:, 1:]))
    where = positions(tokens.shape[1] - 1)
    output = model(input_ids=inputs, position_ids=where, attention_mask=None, labels=labels)
    return output, _mean


def _mean(token_losses: torch.Tensor):
    loss = token_losses.float().mean()
    # A copy: the schedule multiplies the tensor it is given by the context-parallel size and divides it by the number
    # of micro-batches, in place.
    return loss / context.size(), loss.detach().clone()


def run(chunks, micro_batches: list[np.ndarray], train: Train, backward: bool) -> float:
    """Pass this rank's micro-batches through the pipeline.

    Args:
        micro_batches: each `[micro_batch, seq_len + 1]` token ids.
        backward: accumulate gradients and reduce them among the data-parallel ranks.

    Returns:
        Mean loss over the tokens of the global batch, in nats; the same on every rank.
    """
    tensors = [_on_device(batch) for batch in micro_batches]
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[iter(tensors) for _ in chunks] if len(chunks) > 1 else iter(tensors),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(tensors),
        seq_length=train.seq_len,
        micro_batch_size=train.micro_batch,
        forward_only=not backward,
    )
    if not losses:  # not the last pipeline stage
        return from_last_stage(0.0)
    loss = torch.stack(losses).mean()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(loss, group=group)
        loss /= group.size()
    return from_last_stage(loss.item())


def _on_device(batch: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(batch)
    return tensor.pin_memory().to("cuda", non_blocking=True)


def evaluate(chunks, batches, steps: int, train: Train) -> float:
    """Mean loss over the first `steps` global batches of held-out sequences."""
    with evaluating(chunks):
        return sum(run(chunks, batches.step(i), train, backward=False) for i in range(steps)) / steps


class evaluating:
    """Within it the chunks are in evaluation mode, with weights that are complete.

    With overlapped gathering, DDP fetches weights in hooks of the forward pass and expects a training step around
    them; outside of one they are gathered at once and the hooks are off.
    """

    def __init__(self, chunks):
        self.chunks = chunks
        self.hooked = [c for c in chunks if getattr(c, "use_forward_hook", False) and c.remove_forward_pre_hook_handles]

    def __enter__(self):
        for chunk in self.hooked:
            chunk.disable_forward_pre_hook()
        for chunk in self.chunks:
            chunk.eval()

    def __exit__(self, *error):
        for chunk in self.chunks:
            chunk.train()
        for chunk in self.hooked:
            chunk.enable_forward_pre_hook()
