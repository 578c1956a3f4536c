"""Which format each part of training is kept in, as the table that is printed before the first step."""

from conf.schema import Compute, Config, Fp8Recipe, OptimizerName

RECIPES = {
    Fp8Recipe.current: "the tensor's largest value now",
    Fp8Recipe.delayed: "the tensor's largest value in earlier steps",
    Fp8Recipe.blockwise: "each block's largest value",
}


def rows(cfg: Config) -> dict[str, str]:
    """Each part and its format."""
    n, masters = cfg.precision, cfg.precision.main_params.value
    return {
        "weights": n.params.value,
        "products": compute(cfg),
        "between stages": n.activations.value,
        "gradients": n.gradients.value,
        "reduction": n.grad_reduce.value,
        "master weights": masters if masters == "fp32" else "none",
        "moments": "none" if cfg.optimizer.name is OptimizerName.sgd else cfg.optimizer.moments.value,
    }


def compute(cfg: Config) -> str:
    """The format of matrix products, with the word `emulated` where they are."""
    return cfg.precision.compute.value + (" (emulated)" if cfg.precision.fp8.value == "emulated" else "")


def text(cfg: Config) -> str:
    """The table in two lines, and below it what FP8 needs to be understood."""
    found = rows(cfg)
    widths = [max(len(part), len(format)) for part, format in found.items()]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in (found.keys(), found.values())]
    if cfg.precision.compute is Compute.fp8:
        lines += _fp8(cfg.precision, cfg.model.layers)
    return "\n".join(lines)


def _fp8(n, layers: int) -> list[str]:
    backward = "e4m3" if n.fp8_recipe is Fp8Recipe.blockwise else "e5m2"
    others = ", the other layers" if n.bf16_first_layers + n.bf16_last_layers else ""
    return [
        f"FP8: linear layers of layers {n.bf16_first_layers + 1} to {layers - n.bf16_last_layers} of {layers}, "
        f"e4m3 forward, {backward} backward, scaled by {RECIPES[n.fp8_recipe]}",
        f"BF16: attention, norms, embedding, output{others}",
    ]
