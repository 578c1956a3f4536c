"""How many parameters a model has and how many floating-point operations a token costs, by arithmetic alone.

Nothing here imports torch.
"""

from conf.schema import Activation, FlopRule, Model, Norm, Position
from parallel.resolve import padded_vocab


def parameters(m: Model, vocab: int | None = None) -> int:
    """Parameters of the whole model, counted once (tied matrices too), with the padded vocabulary or with `vocab`."""
    vocab = padded_vocab(m) if vocab is None else vocab
    embeddings = vocab * m.hidden * (1 if m.tie_embeddings else 2)
    positions = m.max_positions * m.hidden if m.position is Position.learned else 0
    return embeddings + positions + m.layers * _layer(m) + _norm(m)


def _norm(m: Model) -> int:
    return m.hidden * (2 if m.norm is Norm.layernorm else 1)


def _layer(m: Model) -> int:
    head = m.hidden // m.heads
    qkv = (m.heads + 2 * m.kv_heads) * head
    up = m.ffn_hidden * (2 if m.activation is Activation.swiglu else 1)
    matrices = m.hidden * qkv + m.heads * head * m.hidden + m.hidden * up + m.ffn_hidden * m.hidden
    biases = qkv + m.hidden + up + m.hidden if m.bias else 0
    return matrices + biases + 2 * _norm(m)


def per_token(m: Model, seq_len: int, rule: FlopRule) -> float:
    """Floating-point operations of a forward and a backward pass for one token.

    Both rules charge 6 for each parameter but those of the input embedding and positions (a look-up), and attention's
    score and value products: `full` the whole matrix, 12·layers·hidden·seq (PaLM, appendix B), `causal` the half below
    the diagonal. Recomputed activations are not counted: the result is model FLOPs, as MFU wants.
    """
    used = m.layers * _layer(m) + _norm(m) + padded_vocab(m) * m.hidden
    attention = 12 if rule is FlopRule.full else 6
    return 6 * used + attention * m.layers * m.hidden * seq_len
