"""The environment variables that a layout needs in its ranks. The only place where they are decided."""

import os

from conf.schema import Config, Device
from parallel.devices import capability
from parallel.host import cores


def rank_environment(
    cfg: Config, world_size: int, local_world_size: int | None = None, cores_per_rank: int | None = None
) -> dict[str, str | None]:
    """Variables for every rank of this machine; None means that the variable must not be set.

    cfg: resolved, so its launch.device is cpu or cuda. local_world_size: ranks on this machine, all of them by default.
    cores_per_rank: an equal share of this machine's by default.
    `parallel.env` wins over everything here; what the user's shell says about threads wins over the default.
    """
    local = local_world_size or world_size
    env: dict[str, str | None] = {}
    on_gpu = cfg.launch.device is Device.cuda
    if not on_gpu:
        env["CUDA_VISIBLE_DEVICES"] = ""  # a device that no rank may use must not be initialised by accident
        # Threads that spin long while they wait for one another make a step tens of times as long as soon as another
        # program wants a core; those that sleep at once cost a quiet machine two fifths, these a twentieth.
        if not os.environ.get("OMP_WAIT_POLICY"):
            env["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT") or "10000"
    # Every rank would start one thread a core: eight ranks on two cores then spend their time switching.
    env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(cores_per_rank or max(1, cores() // local))
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = _max_connections(cfg, on_gpu)
    if local == world_size:
        # One machine: gloo looks up the host's own name to find an interface, which fails on many laptops.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env | dict(cfg.parallel.env)


def apply(env: dict[str, str | None], base: dict[str, str]) -> dict[str, str]:
    """`base` with `env` laid over it: values set, None removed."""
    return {name: value for name, value in (base | env).items() if value is not None}


def _max_connections(cfg: Config, on_gpu: bool) -> str | None:
    """CUDA_DEVICE_MAX_CONNECTIONS.

    Megatron's ZeRO-2 and ZeRO-3 gather weights on side streams, which one hardware queue would put in line with the
    computation: it must not be 1. Tensor and context parallelism before Blackwell rely on that very line to start
    a collective before the product it overlaps with: it must be 1. From Blackwell on the order holds without it.
    """
    if cfg.parallel.zero >= 2:
        return None
    if cfg.parallel.tp == 1 and cfg.parallel.cp == 1:
        return None
    # A GPU that cannot be asked is taken for an older one, which costs a Blackwell a little speed and nothing else.
    return "1" if not on_gpu or (capability() or 0) < 10 else None
