"""Rules of a layout: what it may split, how the batch is shared out, which devices it needs."""

import math
import re

from parallel.resolve import largest_dp, micro_batch_unit, model_ranks, padded_vocab, whole, world_size

SET_BY_LAUNCHER = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*)$")


def shape_problems(cfg) -> list[str]:
    """What keeps the model from being split as the layout says."""
    p, m, found = cfg.parallel, cfg.model, []
    tp, pp, vpp, cp, seq_len = whole(p.tp), whole(p.pp), whole(p.vpp), whole(p.cp), whole(cfg.train.seq_len)
    take_tp = near("parallel.tp", tp, legal_tp(cfg))
    for name, size in _split_by_tp(cfg).items():
        if size % tp:
            found.append(f"{name}={size} is not divisible by parallel.tp={tp}: take {take_tp}.")
    if p.sequence_parallel and seq_len % tp:
        found.append(
            f"train.seq_len={seq_len} is not divisible by parallel.tp={tp}, as parallel.sequence_parallel needs: "
            f"take {near('train.seq_len', seq_len, multiples(seq_len, tp))}."
        )
    if p.sequence_parallel and tp == 1:
        found.append(
            "parallel.sequence_parallel splits the sequence among tensor-parallel ranks and parallel.tp=1: "
            "take parallel.sequence_parallel=false or parallel.tp=2."
        )
    layers = whole(m.layers)
    if layers % (pp * vpp):
        stages = [n for n in divisors(layers) if layers % (n * vpp) == 0 and (n > 1 or vpp == 1)]
        take = [near("parallel.pp", pp, stages), near("model.layers", layers, multiples(layers, pp * vpp))]
        found.append(
            f"model.layers={layers} is not divisible by parallel.pp={pp} · parallel.vpp={vpp}: "
            f"take {', or '.join(filter(None, take))}."
        )
    if vpp > 1 and pp == 1:
        found.append(
            f"parallel.vpp={vpp} interleaves virtual stages of a pipeline and parallel.pp=1: "
            "take parallel.vpp=1 or parallel.pp=2."
        )
    if cp > 1 and seq_len % (2 * cp):
        found.append(
            f"train.seq_len={seq_len} is not divisible by 2 · parallel.cp={2 * cp}: "
            f"take {near('train.seq_len', seq_len, multiples(seq_len, 2 * cp))}."
        )
    if m.tie_embeddings and pp > 1 and p.zero >= 2:
        found.append(
            f"model.tie_embeddings shares a matrix between the first and the last of parallel.pp={pp} stages, and "
            f"ZeRO-{p.zero} cannot add up its gradients: take parallel.zero=1 or model.tie_embeddings=false."
        )
    if p.bucket_mb is not None and not p.overlap and p.zero <= 1:
        found.append(
            f"parallel.bucket_mb={p.bucket_mb} has no effect while everything is reduced at once: "
            "take parallel.overlap=true or parallel.bucket_mb=null."
        )
    if not 0 <= p.zero <= 3:
        found.append(f"parallel.zero={p.zero} is not a ZeRO stage: take parallel.zero={min(max(p.zero, 0), 3)}.")
    if not (isinstance(p.dp, int) and p.dp > 0):
        found.append(f"parallel.dp={p.dp} is neither auto nor 1 or more: take parallel.dp=auto.")
    return found + _environment(p)


def _environment(p) -> list[str]:
    found = []
    for name, value in p.env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            found.append(f"parallel.env.{name} is not the name of an environment variable: use letters, digits and _.")
        elif SET_BY_LAUNCHER.match(name):
            found.append(f"parallel.env.{name} is set for each rank by the launcher: leave it out.")
        elif name == "CUDA_VISIBLE_DEVICES":
            found.append(f"parallel.env.{name} would hide devices that were counted: set it for the whole command.")
        elif name == "CUDA_DEVICE_MAX_CONNECTIONS" and value == "1" and p.zero >= 2:
            found.append(f"parallel.env.{name}=1 keeps ZeRO-{p.zero} from overlapping: leave it out or take 8.")
    return found


def _split_by_tp(cfg) -> dict[str, int]:
    """Every size that tensor parallelism divides, by the key it comes from."""
    m = cfg.model
    return {
        "model.heads": whole(m.heads),
        "model.kv_heads": whole(m.kv_heads),
        "model.ffn_hidden": whole(m.ffn_hidden),
        "model.vocab (padded)": padded_vocab(m),
    }


def legal_tp(cfg) -> list[int]:
    """Tensor-parallel sizes that divide everything they have to."""
    sizes = list(_split_by_tp(cfg).values()) + ([whole(cfg.train.seq_len)] if cfg.parallel.sequence_parallel else [])
    return divisors(math.gcd(*sizes))


def batch_problems(cfg) -> list[str]:
    """What keeps the global batch from being shared out evenly."""
    batch, micro = whole(cfg.train.global_batch), whole(cfg.train.micro_batch)
    dp, pp = whole(cfg.parallel.dp), whole(cfg.parallel.pp)
    unit = micro_batch_unit(cfg)
    if batch % (unit * dp) == 0:
        return []
    take = near("train.global_batch", batch, multiples(batch, unit * dp))
    smaller = [n for n in divisors(batch) if n < micro and batch % (unit // micro * n * dp) == 0]
    if smaller:
        take += f", or train.micro_batch={smaller[-1]}"
    if batch % (micro * dp):
        return [
            f"train.global_batch={batch} is not divisible by train.micro_batch={micro} · parallel.dp={dp}: take {take}."
        ]
    return [
        f"the micro-batches of a rank ({batch // (micro * dp)}) are not a multiple of parallel.pp={pp}, "
        f"as virtual stages need: take {take}."
    ]


def device_problems(cfg, gpus: int, world: int | None) -> list[str]:
    """What keeps the ranks from finding a device each."""
    ranks, per_replica, p = world_size(cfg), model_ranks(cfg.parallel), cfg.parallel
    layout = f"tp {p.tp} · pp {p.pp} · cp {p.cp} · dp {p.dp}"
    if cfg.launch.device == "cuda" and gpus == 0:
        return ["launch.device=cuda needs a GPU and none is visible: take launch.device=cpu, or look at nvidia-smi."]
    if world is not None and ranks != world:
        dp = f", or take parallel.dp={world // per_replica}" if world % per_replica == 0 else ""
        return [f"the layout needs {ranks} ranks ({layout}) and {world} were started: start {ranks}{dp}."]
    if world is None and cfg.launch.device == "cuda" and ranks > gpus:
        there = f"{gpus} GPUs are visible" if gpus > 1 else "one GPU is visible"
        take = f"take {_fitting(cfg, gpus)}, or launch.device=cpu"
        return [f"the layout needs {ranks} ranks ({layout}) and {there}: {take}."]
    return []


def _fitting(cfg, gpus: int) -> str:
    """The legal layout of at most `gpus` ranks that is nearest to the one asked for."""
    p, layers = cfg.parallel, whole(cfg.model.layers)
    if model_ranks(p) <= gpus:
        return f"parallel.dp={largest_dp(cfg, gpus // model_ranks(p))}"
    layouts = [(tp, pp) for tp in legal_tp(cfg) for pp in divisors(layers) if tp * pp <= gpus]
    tp, pp = max(layouts, key=lambda at: (at[0] * at[1], -abs(at[0] - whole(p.tp)) - abs(at[1] - whole(p.pp))))
    also = " parallel.vpp=1" if pp == 1 and whole(p.vpp) > 1 else ""
    also += " parallel.sequence_parallel=false" if tp == 1 and p.sequence_parallel else ""
    return f"parallel.tp={tp} parallel.pp={pp} parallel.dp=1{also}"


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def multiples(n: int, unit: int) -> list[int]:
    """The multiples of `unit` on both sides of `n`."""
    return [m for m in (n // unit * unit, n // unit * unit + unit) if m > 0]


def near(key: str, value: int, allowed: list[int]) -> str:
    """`key=below or key=above`: the legal values on both sides of `value`."""
    below, above = [n for n in allowed if n < value], [n for n in allowed if n > value]
    return " or ".join(f"{key}={n}" for n in below[-1:] + above[:1])
