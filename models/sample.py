"""Text from a model in training: the same forward pass as training, one token at a time, under every layout."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from models import context
from models.loss import evaluating, positions


def _logits(tokens, model):
    tokens = next(tokens)
    output = model(input_ids=context.local(tokens), position_ids=positions(tokens.shape[1]), attention_mask=None)
    return output, None


@torch.no_grad()
def sample(chunks, tokenizer, prompt: str, length: int, seq_len: int, seed: int, temperature: float = 0.6) -> str:
    """Continue `prompt` by `length` tokens drawn at `temperature`.

    Every rank must call it and gets the same text. The whole sequence is computed anew for each token, padded to
    `seq_len` on the right, which a causal model does not see: simple, and right for a few hundred tokens.
    """
    text = tokenizer.encode(prompt) or [tokenizer.eod or 0]
    known = len(tokenizer.decode(text))  # which may differ from the prompt: a tokenizer can change blanks
    generator = torch.Generator().manual_seed(seed)
    with evaluating(chunks):
        for _ in range(length):
            window = text[-seq_len:]
            tokens = torch.zeros(1, seq_len, dtype=torch.long, device="cuda")
            tokens[0, : len(window)] = torch.tensor(window, device="cuda")
            text.append(_next(chunks, tokens, len(window) - 1, tokenizer.vocab_size, temperature, generator))
    return tokenizer.decode(text)[known:]


def _next(chunks, tokens, last: int, vocab: int, temperature: float, generator) -> int:
    # The interleaved schedule wants as many micro-batches as there are stages, so it gets copies.
    copies = parallel_state.get_pipeline_model_parallel_world_size() if len(chunks) > 1 else 1
    outputs = get_forward_backward_func()(
        forward_step_func=_logits,
        data_iterator=[iter([tokens] * copies) for _ in chunks] if len(chunks) > 1 else iter([tokens]),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=copies,
        seq_length=tokens.shape[1],
        micro_batch_size=1,
        forward_only=True,
    )
    chosen = torch.zeros(1, dtype=torch.long, device="cuda")
    here, owner = _place(tokens.shape[1], last)
    if outputs and here is not None:
        logits = gather_from_tensor_model_parallel_region(outputs[0][:, here])[0, :vocab].float().cpu()
        chosen[0] = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
    # One rank's choice for all: data-parallel replicas agree only up to rounding.
    dist.broadcast(chosen, owner)
    return chosen.item()


def _place(seq_len: int, position: int) -> tuple[int | None, int]:
    """Where this rank holds a position, None if it does not, and the last rank of the world that holds its logits."""
    chunk, inside = divmod(position, seq_len // (2 * context.size()))
    rank = next(rank for rank in range(context.size()) if chunk in context.chunks_of(rank))
    tp, cp = parallel_state.get_tensor_model_parallel_world_size(), context.size()
    # Megatron numbers ranks tp fastest, then cp, dp and pp.
    owner = dist.get_world_size() - tp * (cp - rank) + tp - 1
    held = context.here()
    return (held.index(chunk) * (seq_len // (2 * cp)) + inside if chunk in held else None), owner
