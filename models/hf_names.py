"""Where each tensor of a Hugging Face Llama lies in a checkpoint of this project, by arithmetic alone.

Nothing here imports torch. A checkpoint keeps one tensor for each kind of weight, over all layers. Attention's is
query, key and value rows by groups of heads that share a key, the MLP's is gate above up. Both are whole rows of
Hugging Face's tensors, and both sides turn the rotary pairs alike, so no number changes place inside a row.
"""

import re
from dataclasses import dataclass

from parallel.resolve import padded_vocab

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
LM_HEAD = "lm_head.weight"
# A function of rope_theta that early files carry along.
INVERSE_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_LAYER = "decoder.layers."


@dataclass(frozen=True)
class Rows:
    """The rows [start, end) of a Hugging Face tensor, which are `key[layer, at : at + end - start]` of a checkpoint."""

    key: str
    layer: int | None
    at: int
    start: int
    end: int


@dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor: its shape, and its rows in order."""

    shape: tuple[int, ...]
    rows: tuple[Rows, ...]

    def boxes(self):
        """Of each part the rows, and the offset and the shape it has in the checkpoint."""
        for rows in self.rows:
            layer, layers = ((), ()) if rows.layer is None else ((rows.layer,), (1,))
            yield (
                rows,
                (*layer, rows.at, *(0,) * (len(self.shape) - 1)),
                (*layers, rows.end - rows.start, *self.shape[1:]),
            )


def tensors(model) -> dict[str, Tensor]:
    """Every tensor of a Llama of this shape (conf.schema.Model), in the order of the network."""
    hidden, ffn, head = model.hidden, model.ffn_hidden, model.hidden // model.heads
    found = {"model.embed_tokens.weight": _whole(EMBEDDING, None, model.vocab, hidden)}
    for layer in range(model.layers):
        ours = {
            "input_layernorm.weight": _whole(f"{_LAYER}input_layernorm.weight", layer, hidden),
            "post_attention_layernorm.weight": _whole(f"{_LAYER}pre_mlp_layernorm.weight", layer, hidden),
        }
        for kind, columns in (("weight", True), ("bias", False)):
            if kind == "bias" and not model.bias:
                continue

            def shape(rows: int, width: int, columns=columns) -> tuple[int, ...]:
                return (rows, width) if columns else (rows,)

            qkv, fc1 = (f"{_LAYER}{name}.{kind}" for name in ("self_attention.linear_qkv", "mlp.linear_fc1"))
            for name, heads, before in _heads(model):
                rows = heads * head
                ours[f"self_attn.{name}_proj.{kind}"] = Tensor(
                    shape(rows * model.kv_heads, hidden),
                    tuple(
                        Rows(qkv, layer, (group * _group(model) + before) * head, group * rows, (group + 1) * rows)
                        for group in range(model.kv_heads)
                    ),
                )
            proj, fc2 = (f"{_LAYER}{name}.{kind}" for name in ("self_attention.linear_proj", "mlp.linear_fc2"))
            ours[f"self_attn.o_proj.{kind}"] = _whole(proj, layer, *shape(hidden, hidden))
            ours[f"mlp.gate_proj.{kind}"] = _whole(fc1, layer, *shape(ffn, hidden))
            ours[f"mlp.up_proj.{kind}"] = _whole(fc1, layer, *shape(ffn, hidden), at=ffn)
            ours[f"mlp.down_proj.{kind}"] = _whole(fc2, layer, *shape(hidden, ffn))
        found |= {f"model.layers.{layer}.{name}": tensor for name, tensor in ours.items()}
    found["model.norm.weight"] = _whole("decoder.final_layernorm.weight", None, hidden)
    if not model.tie_embeddings:
        found[LM_HEAD] = _whole(OUTPUT, None, model.vocab, hidden)
    return found


def shapes(model) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors and their shapes, with the padded vocabulary."""
    found: dict[str, tuple[int, ...]] = {}
    for tensor in tensors(model).values():
        for rows, offset, shape in tensor.boxes():
            end = tuple(a + b for a, b in zip(offset, shape, strict=True))
            found[rows.key] = tuple(map(max, end, found.get(rows.key, end)))
    for key in {EMBEDDING, OUTPUT} & found.keys():
        found[key] = (padded_vocab(model), model.hidden)
    return found


def _whole(key: str, layer: int | None, *shape: int, at: int = 0) -> Tensor:
    return Tensor(shape, (Rows(key, layer, at, 0, shape[0]),))


def _group(model) -> int:
    """Heads, of queries, keys and values, in one group of attention's matrix."""
    return model.heads // model.kv_heads + 2


def _heads(model):
    """Name, heads in a group, and heads of the group before it."""
    queries = model.heads // model.kv_heads
    return ("q", queries, 0), ("k", 1, queries), ("v", 1, queries + 1)
