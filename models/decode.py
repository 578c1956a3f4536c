"""Text token by token, by the chunks that training uses, under every layout.

`Cached` keeps keys and values of the tokens so far and computes each token once (Megatron-core's static inference
context). `Whole` computes everything anew for each token: it takes any layout, and the cache is tested against it.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import get_model_config

from models import context
from models.loss import evaluating
from models.sampling import Sampling, pick


def can_cache(chunks) -> bool:
    """Whether a single token can be computed under this layout, which must not split a sequence among ranks."""
    return context.size() == 1 and not get_model_config(chunks[0]).sequence_parallel


@torch.no_grad()
def continued(
    chunks, text: list[int], count: int, window: int, vocab: int, how: Sampling, cached: bool
) -> Iterator[int]:
    """Continue `text` by `count` tokens, one after the other; every rank must call it and gets the same.

    Args:
        text: token ids, at least one.
        window: tokens the model looks back on at most; when they are full, the older half is forgotten.
        vocab: ids from here on are padding, or unknown to the tokenizer, and never chosen.
        cached: keep keys and values; only where `can_cache`.
    """
    text, generator, start = list(text), how.generator(), max(0, len(text) - window)
    seen = Cached(chunks, min(window, len(text) + count)) if cached else Whole(chunks)
    with evaluating(chunks):
        for _ in range(count):
            if len(text) - start > window:
                start = len(text) - max(1, window // 2)
                seen.forget()
            logits, owner = seen.logits(text[start:])
            chosen = torch.zeros(1, dtype=torch.long, device="cuda")
            if logits is not None:
                chosen[0] = pick(logits[:vocab].float().cpu(), how, generator)
            # One rank's choice for all: others agree only up to rounding.
            dist.broadcast(chosen, owner)
            text.append(int(chosen))
            yield text[-1]


class Whole:
    """The whole text through the model for each token."""

    def __init__(self, chunks):
        self.chunks = chunks
        # What the length has to be divisible by, to be split as training splits it.
        self.unit = 2 * context.size() if context.size() > 1 else 1
        if get_model_config(chunks[0]).sequence_parallel:
            self.unit *= parallel_state.get_tensor_model_parallel_world_size()

    def forget(self) -> None:
        """Nothing is kept."""

    def logits(self, text: list[int]) -> tuple[torch.Tensor | None, int]:
        """Logits `[padded vocab]` of the token after `text`, None on ranks without, and which rank has them."""
        length = self.unit * math.ceil(len(text) / self.unit)
        # Padding stands on the right, where a causal model does not see it.
        tokens = torch.tensor([text + [0] * (length - len(text))], device="cuda")
        positions = context.local(torch.arange(length, device="cuda").unsqueeze(0))

        def forward(_, model):
            return model(input_ids=context.local(tokens), position_ids=positions, attention_mask=None), None

        outputs = _through(self.chunks, forward, length)
        here, owner = _place(length, len(text) - 1)
        if not outputs or here is None:
            return None, owner
        return gather_from_tensor_model_parallel_region(outputs[0][:, here])[0], owner


class Cached:
    """Only the new tokens through the model; `size` tokens are the most it can hold."""

    def __init__(self, chunks, size: int):
        self.chunks = chunks
        self.context = StaticInferenceContext(max_batch_size=1, max_sequence_length=size)

    def forget(self) -> None:
        """Begin a new text in the same memory."""
        self.context.reset()

    def logits(self, text: list[int]) -> tuple[torch.Tensor | None, int]:
        """As `Whole.logits`; `text` must begin with the text before."""
        known = self.context.sequence_len_offset
        tokens = torch.tensor([text[known:]], device="cuda")
        positions = torch.arange(known, len(text), device="cuda").unsqueeze(0)

        def forward(_, model):
            with InferenceMode.active():  # the output layer computes the last token alone
                logits = model(
                    input_ids=tokens,
                    position_ids=positions,
                    attention_mask=None,
                    inference_context=self.context,
                    runtime_gather_output=True,
                )
            return logits, None

        outputs = _through(self.chunks, forward, len(text) - known)
        self.context.sequence_len_offset = len(text)
        self.context.enable_decode_mode()
        return outputs[0][0, -1] if outputs else None, dist.get_world_size() - 1


def _through(chunks, forward, length: int) -> list[torch.Tensor]:
    """One sequence through the pipeline; the output on the last stage, nothing on the others."""
    # The interleaved schedule wants as many micro-batches as there are stages, so it gets copies.
    copies = parallel_state.get_pipeline_model_parallel_world_size() if len(chunks) > 1 else 1
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[None for _ in chunks] if len(chunks) > 1 else None,
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=copies,
        seq_length=length,
        micro_batch_size=1,
        forward_only=True,
    )


def _place(length: int, position: int) -> tuple[int | None, int]:
    """Where this rank holds a position, None if it does not, and the last rank of the world that holds its logits."""
    if context.size() == 1:
        return position, dist.get_world_size() - 1
    chunk, inside = divmod(position, length // (2 * context.size()))
    rank = next(rank for rank in range(context.size()) if chunk in context.chunks_of(rank))
    tp, cp = parallel_state.get_tensor_model_parallel_world_size(), context.size()
    # Megatron numbers ranks tp fastest, then cp, dp and pp.
    owner = dist.get_world_size() - tp * (cp - rank) + tp - 1
    held = context.here()
    return (held.index(chunk) * (length // (2 * cp)) + inside if chunk in held else None), owner
