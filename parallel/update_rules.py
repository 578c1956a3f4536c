"""Rules of the groups `optimizer` and `clip`, and of the offload: what each choice reads, and what it cannot do."""

from models import flops
from optim.threshold import by_model_size
from parallel.number_rules import WHOLE
from parallel.resolve import whole

# The keys that each rule reads besides lr, weight_decay and moments.
READS = {
    "sgd": [],
    "momentum": ["momentum"],
    "rmsprop": ["beta2", "eps"],
    "adagrad": ["eps"],
    "adam": ["beta1", "beta2", "eps"],
    "adamw": ["beta1", "beta2", "eps"],
    "lamb": ["beta1", "beta2", "eps"],
    "lion": ["beta1", "beta2"],
    "adafactor": ["beta2_decay", "update_clip", "scale_floor"],
    "muon": ["momentum", "newton_schulz_steps", "beta1", "beta2", "eps"],
}
OWN_KEYS = sorted({key for keys in READS.values() for key in keys})
CLIP_READS = {
    "none": [],
    "fixed": ["max_norm"],
    "by_model_size": ["max_norm"],
    "adaptive": ["quantile", "window"],
    "per_layer": ["max_norm"],
    "by_value": ["max_value"],
}
CLIP_KEYS = ["max_norm", "max_value", "quantile", "window"]


def problems(cfg) -> list[str]:
    """What forbids these groups, one sentence each; `cfg` is resolved."""
    o, clip, found = cfg.optimizer, cfg.clip, []
    found += _keys("optimizer", o, str(o.name), READS[o.name], OWN_KEYS)
    found += _keys("clip", clip, str(clip.kind), CLIP_READS[clip.kind], CLIP_KEYS)
    if o.moments not in ("fp32", "bf16"):
        found.append(f"optimizer.moments={o.moments}: moments are kept in fp32 or bf16.")
    none = {"sgd": "has no moments", "adafactor": "keeps one number a row and a column, which take next to nothing"}
    if o.name in none and o.moments == "bf16":
        found.append(f"optimizer={o.name} {none[o.name]}: take optimizer.moments=fp32.")
    if o.name in none and cfg.parallel.offload == "optimizer":
        found.append(f"optimizer={o.name} {none[o.name]}, so there is nothing to offload: take parallel.offload=none.")
    if cfg.model.mup and o.name in WHOLE:
        found.append(
            f"model.mup=true scales learning rates by width for rules like SGD's and Adam's, and updates of {o.name} "
            "are relative to each tensor already: take model.mup=false or optimizer=adamw."
        )
    if clip.kind == "by_model_size" and whole(cfg.model.heads, 0):
        rule = by_model_size(flops.parameters(cfg.model))
        if clip.max_norm != rule:
            found.append(
                f"clip=by_model_size computes clip.max_norm={rule:g} and {clip.max_norm:g} is asked for: "
                f"leave clip.max_norm out, or take clip=1.0 clip.max_norm={clip.max_norm:g}."
            )
    return found


def _keys(group: str, values, choice: str, read: list[str], all_keys: list[str]) -> list[str]:
    found = []
    for key in all_keys:
        value = getattr(values, key)
        # The threshold by model size is computed when the configuration is resolved.
        if key in read and value is None and choice != "by_model_size":
            found.append(f"{group}.{key} has no value and {choice} needs one: set it, or take {group}={choice}.")
        elif key not in read and value is not None:
            found.append(
                f"{group}.{key}={value} is not read by {choice}: take {group}={_option(choice)}, "
                f"which leaves it out, or {group}.{key}=null."
            )
    return found


def _option(choice: str) -> str:
    return "1.0" if choice == "fixed" else choice


def notes(cfg) -> list[str]:
    """What is legal but worth a line before the run starts; `cfg` is resolved."""
    said, o = [], cfg.optimizer
    if cfg.parallel.offload == "optimizer" and cfg.launch.device == "cpu":
        said.append("parallel.offload=optimizer: on a CPU the moments are in host memory anyway, so nothing is saved.")
    if o.moments == "bf16" and o.beta2 is not None and o.beta2 > 0.99 and o.name != "lion":
        said.append(
            f"optimizer.moments=bf16 rounds changes below 0.4 % away, and with optimizer.beta2={o.beta2} the second "
            "moment changes by less where gradients vanish: it stays too large; optimizer.beta2=0.98 avoids it."
        )
    return said
