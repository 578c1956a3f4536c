"""What model state takes, by arithmetic, and what to change when memory runs out. Nothing here imports torch."""

from models import flops
from parallel.host import memory

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


def state_gib(cfg, parameters: float) -> float:
    """Weights, gradients, master weights and moments of one rank, in GiB.

    `parameters` are those of the rank before ZeRO shares anything out (1/(tp·pp) of the model).
    """
    p, precision, shared_by = cfg.parallel, cfg.precision, cfg.parallel.dp * cfg.parallel.cp
    weights = BYTES[precision.params] / (shared_by if p.zero >= 3 else 1)
    gradients = BYTES[precision.grad_reduce] / (shared_by if p.zero >= 2 else 1)
    master = 0 if precision.params == precision.main_params else BYTES[precision.main_params]
    state = (master + 4 * MOMENTS[cfg.optimizer.name]) / (shared_by if p.zero >= 1 else 1)
    return parameters * (weights + gradients + state) / 2**30


def problems(cfg, trains: bool = True) -> list[str]:
    """Whether the state of all ranks fits this machine, where they share its memory; `cfg` is legal otherwise.

    Without `trains` the state is the weights alone.
    """
    if cfg.launch.device != "cpu":
        return []
    p, has = cfg.parallel, memory()[0] / 2**30
    need = p.dp * p.cp * p.tp * p.pp * state_gib(cfg, flops.parameters(cfg.model) / (p.tp * p.pp))
    if not trains:
        need = flops.parameters(cfg.model) * BYTES[cfg.precision.params] / 2**30
    if need <= has:
        return []
    what = "weights, gradients and optimizer state of all ranks" if trains else "its weights"
    return [
        f"model={cfg.model.name} needs {need:,.0f} GiB for {what}, and "
        f"this machine has {has:.0f} GiB: take a smaller model (model=tiny, model=small) or a machine with GPUs."
    ]


def advice(cfg) -> str:
    """The overrides that lower memory most for the least change, nearest first."""
    p, t, tries = cfg.parallel, cfg.train, []
    if t.micro_batch > 1:
        tries.append(f"train.micro_batch={t.micro_batch // 2}")
    if p.recompute != "full":
        tries.append("parallel.recompute=full")
    if p.zero < 3 and p.dp > 1:
        tries.append(f"parallel.zero={3 if p.zero == 1 else p.zero + 1}")
    if not tries:
        tries.append(f"parallel.tp={2 * p.tp}")
    return "out of memory: try " + ", then ".join(tries)
