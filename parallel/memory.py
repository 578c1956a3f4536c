"""What model state takes, by arithmetic, and what to change when memory runs out. Nothing here imports torch."""

from models import flops
from parallel.host import memory

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Moments of a weight inside the layers; Adafactor's are one number a row and one a column.
MOMENTS = dict(sgd=0, momentum=1, rmsprop=1, adagrad=1, adam=2, adamw=2, lamb=2, lion=1, adafactor=0, muon=1)


def moment_bytes(cfg) -> float:
    """What the moments of one parameter take on the device, averaged over the model."""
    if cfg.parallel.offload == "optimizer" and cfg.launch.device == "cuda":
        return 0.0
    moments = float(MOMENTS[cfg.optimizer.name])
    if cfg.optimizer.name == "muon":  # AdamW's two for embeddings and output layer
        m = cfg.model
        moments += flops.padded_vocab(m) * m.hidden * (1 if m.tie_embeddings else 2) / flops.parameters(m)
    return moments * BYTES[cfg.optimizer.moments]


def state_gib(cfg, parameters: float) -> float:
    """Weights, gradients, master weights and moments of one rank, in GiB.

    `parameters` are those of the rank before ZeRO shares anything out (1/(tp·pp) of the model).
    """
    p, precision, shared_by = cfg.parallel, cfg.precision, cfg.parallel.dp * cfg.parallel.cp
    weights = BYTES[precision.params] / (shared_by if p.zero >= 3 else 1)
    gradients = BYTES[precision.grad_reduce] / (shared_by if p.zero >= 2 else 1)
    master = 0 if precision.params == precision.main_params else BYTES[precision.main_params]
    state = (master + moment_bytes(cfg)) / (shared_by if p.zero >= 1 else 1)
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


def tries(cfg) -> list[str]:
    """The overrides that lower memory most for the least change, nearest first."""
    p, t, tries = cfg.parallel, cfg.train, []
    if t.micro_batch > 1:
        tries.append(f"train.micro_batch={t.micro_batch // 2}")
    if p.recompute != "full":
        tries.append("parallel.recompute=full")
    if p.zero < 3 and p.dp > 1:
        tries.append(f"parallel.zero={3 if p.zero == 1 else p.zero + 1}")
    if p.offload == "none" and cfg.launch.device == "cuda" and MOMENTS[cfg.optimizer.name]:
        tries.append("parallel.offload=optimizer")
    if not tries:
        tries.append(f"parallel.tp={2 * p.tp}")
    return tries
