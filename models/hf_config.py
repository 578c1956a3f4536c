"""A Hugging Face Llama `config.json` in the words of this project's model group, and back. Nothing here imports torch.

Every value that decides what the model computes is read; one that this project cannot follow is refused by its name.
"""

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# What a config.json must say itself; the rest has had one default since the first Llama.
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The frequencies that Llama 3.1 to 3.3 scale, as Megatron-core has them built in; only the factor is free.
LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
_VOCAB_MULTIPLE = 128
# Read below, or without effect on what is computed.
_KNOWN = {
    *REQUIRED,
    *"model_type architectures num_key_value_heads hidden_act rms_norm_eps rope_theta rope_scaling rope_parameters "
    "max_position_embeddings tie_word_embeddings attention_bias mlp_bias head_dim dtype torch_dtype bos_token_id "
    "eos_token_id pad_token_id initializer_range use_cache pretraining_tp transformers_version attention_dropout "
    "_name_or_path".split(),
}
# Values of keys of other models that change nothing; any other value of them is refused.
_NEUTRAL = {"quantization_config": None, "sliding_window": None, "partial_rotary_factor": 1, "layer_types": None}


class Unsupported(Exception):
    """A model that cannot be taken over; one sentence for each reason."""

    is_sentence = True  # a traceback would add nothing

    def __init__(self, sentences: list[str]):
        super().__init__(" ".join(sentences))
        self.sentences = sentences


def to_model(config: dict) -> tuple[dict, list[str]]:
    """Keys of the model group for a `config.json`, and the names in it that nobody has read.

    Raises Unsupported with every value that this project has no counterpart for.
    """
    kind = config.get("model_type")
    if kind != "llama":
        raise Unsupported([f"config.json: model_type={kind!r} is not supported: that of Llama models is 'llama'."])
    missing = [name for name in REQUIRED if not isinstance(config.get(name), int)]
    if missing:
        raise Unsupported([f"config.json: {', '.join(missing)} is missing or no whole number."])
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    base, factor, wrong = _rope(config)
    head_dim = config.get("head_dim")
    if head_dim is not None and head_dim * heads != hidden:
        wrong.append(
            f"config.json: head_dim={head_dim} is not hidden_size / num_attention_heads = {hidden}/{heads}: "
            "heads of another size are not supported."
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        wrong.append(f"config.json: hidden_act={config['hidden_act']!r} is not supported: Llama's is 'silu'.")
    bias = bool(config.get("attention_bias", False))
    if bias != bool(config.get("mlp_bias", False)):
        wrong.append(
            f"config.json: attention_bias={bias} and mlp_bias={not bias}: biases in all linear layers or in none."
        )
    for name, neutral in _NEUTRAL.items():
        if config.get(name, neutral) != neutral:
            wrong.append(f"config.json: {name}={config[name]!r} is not supported.")
    if wrong:
        raise Unsupported(wrong)
    model = dict(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn_hidden=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        vocab=config["vocab_size"],
        vocab_multiple=_VOCAB_MULTIPLE,
        norm="rmsnorm",
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation="swiglu",
        position="rope",
        rope_base=float(base),
        rope_factor=float(factor),
        max_positions=config.get("max_position_embeddings", 2048),
        bias=bias,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
    return model, sorted(config.keys() - _KNOWN - _NEUTRAL.keys())


def _rope(config: dict) -> tuple[float, float, list[str]]:
    """Base of the rotary angles, Llama 3's factor, and what of them is not supported; older and newer spelling."""
    newer = config.get("rope_parameters") or {}
    scaling = newer or config.get("rope_scaling") or {}
    base = newer.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return base, 1.0, []
    where = "rope_parameters" if newer else "rope_scaling"
    if kind != "llama3":
        return base, 1.0, [f"config.json: {where} of type {kind!r} is not supported: Llama 3.1's ('llama3') is."]
    wrong = [
        f"config.json: {where}.{name}={scaling.get(name)} is not supported: Llama 3's is {value}."
        for name, value in LLAMA3.items()
        if scaling.get(name) != value
    ]
    if not isinstance(scaling.get("factor"), (int, float)):
        wrong.append(f"config.json: {where}.factor is missing.")
    return base, scaling.get("factor", 1.0), wrong


def from_model(model: dict) -> dict:
    """A `config.json` for a model group's values; raises Unsupported for a model that Llama has no words for."""
    llama = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "mup": False}
    wrong = [
        f"model.{name}={model[name]} has no counterpart in a Llama: only models with model.{name}={value} are exported."
        for name, value in llama.items()
        if model.get(name, value) != value
    ]
    if wrong:
        raise Unsupported(wrong)
    factor = model.get("rope_factor", 1.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model["vocab"],
        "hidden_size": model["hidden"],
        "intermediate_size": model["ffn_hidden"],
        "num_hidden_layers": model["layers"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"],
        "head_dim": model["hidden"] // model["heads"],
        "hidden_act": "silu",
        "max_position_embeddings": model["max_positions"],
        "rms_norm_eps": model["norm_eps"],
        "rope_theta": model["rope_base"],
        "rope_scaling": None if factor == 1 else {"rope_type": "llama3", "factor": factor, **LLAMA3},
        "attention_bias": model["bias"],
        "mlp_bias": model["bias"],
        "tie_word_embeddings": model["tie_embeddings"],
    }
