"""Initial weights as a pure function of (seed, parameter's global name, global shape).

Megatron-core draws weights from a generator of each rank, so they depend on the layout. Here every parameter is
written from its place in the whole model, which Megatron itself knows: `sharded_state_dict()` names each parameter
globally and says which part of the global tensor this rank holds. So TP, PP, virtual stages, DP and ZeRO start alike.

Distribution: normal(0, init_std) for matrices and embeddings, divided by sqrt(2·layers) for the two matrices of each
layer that write to the residual stream (GPT-2; Radford et al. 2019); norms 1, biases 0. With `model.mup` the
layers' matrices are divided by sqrt(width / base width) too, embeddings and output layer are not (Yang et al. 2022).
"""

import hashlib
import math

import torch

from conf.schema import Model

# Rows are drawn in blocks of about this many elements, each with its own generator: a rank draws only blocks it needs,
# and no whole global tensor is ever held.
_BLOCK = 1 << 20


def initialize(chunk: torch.nn.Module, model: Model, seed: int) -> None:
    """Write the initial weights of one model chunk (before it is wrapped), in place."""
    for part in parts(chunk.sharded_state_dict()):
        fill_(part.data, part.key, part.global_shape, part.global_offset, part.prepend_axis_num, model, seed)


def parts(sharded_state_dict):
    """The ShardedTensors of a state dict; a gated MLP's matrix comes as a factory of two, which are views of it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in nested_values(sharded_state_dict):
        if isinstance(value, ShardedTensorFactory):
            yield from nested_values(value.build())
        elif isinstance(value, ShardedTensor) and value.data is not None:
            yield value


@torch.no_grad()
def fill_(data, key: str, global_shape, global_offset, prepended: int, model: Model, seed: int) -> None:
    """Write this rank's part of one parameter.

    Args:
        data: the rank's part, a view of the parameter.
        key: global name, without the layer's number.
        global_shape, global_offset: whole tensor and where the part begins; the first `prepended` axes (the layer's
            number) are not axes of `data`.
    """
    layer = tuple(global_offset[:prepended])
    shape, offset = tuple(global_shape[prepended:]), tuple(global_offset[prepended:])
    if key.endswith("layernorm.weight"):
        data.fill_(1.0)
    elif key.endswith(".bias"):
        data.zero_()
    elif len(shape) == 2:
        std = model.init_std
        if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
            std /= math.sqrt(2 * model.layers)
        if model.mup and key.startswith("decoder."):
            std /= math.sqrt(model.hidden / model.mup_base_hidden)
        _fill_normal(data, f"{seed}/{key}/{layer}/{shape}", shape, offset, std)
    else:
        raise ValueError(f"No rule for the initial value of {key} with shape {shape}.")


def _fill_normal(data, name: str, shape, offset, std: float) -> None:
    rows = max(1, _BLOCK // shape[1])
    first, last = offset[0], offset[0] + data.shape[0]
    for start in range(first - first % rows, last, rows):
        digest = hashlib.sha256(f"{name}/{start}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        block = torch.empty(min(rows, shape[0] - start), shape[1]).normal_(0.0, std, generator=generator)
        low, high = max(start, first), min(start + block.shape[0], last)
        columns = slice(offset[1], offset[1] + data.shape[1])
        data[low - first : high - first].copy_(block[low - start : high - start, columns])
