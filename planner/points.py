"""From the words of the command line to checked configurations for a cluster, without Hydra's run folder."""

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from conf.schema import Config
from parallel import compose, layouts
from parallel.refused import Refused
from parallel.resolve import model_ranks, world_size

POSITIVE = ("memory_gb", "memory_tb_s", "nvlink_gb_s", "network_gb_s", "devices_per_node", "nodes")


def split(words: list[str]) -> list[list[str]]:
    """The words of every point that `-m` asks for: each comma makes a dimension.

    Raises Refused for words that cannot be read.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(compose.quote_choices(words))
        (points,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise Refused([str(error).splitlines()[0]]) from None
    return [list(point) for point in points]


def config(words: list[str]) -> Config:
    """The checked configuration of a point on its cluster.

    Raises Refused with every reason why there is none.
    """
    composed, *_ = compose.compose(words)
    _cluster(composed.cluster)
    devices = _devices(composed.cluster)
    if devices is not None:
        composed.launch.device = "cuda"
        _fits_cluster(composed, devices)
    cfg = compose.check(composed, gpus=devices or 0)
    return OmegaConf.to_object(cfg) if not isinstance(cfg, Config) else cfg


def _devices(cluster) -> int | None:
    if cluster.devices_per_node is None:
        return None
    return cluster.devices_per_node * cluster.nodes


def _cluster(cluster) -> None:
    """A cluster without a device is this machine; any other says everything."""
    if cluster.device is None and cluster.devices_per_node is None:
        return
    found = []
    for name in POSITIVE:
        value = OmegaConf.select(cluster, name)
        if value is None:
            found.append(f"cluster.{name} has no value in cluster={cluster.name}: give it, as conf/cluster/*.yaml do.")
        elif value <= 0:
            found.append(f"cluster.{name}={value} of cluster={cluster.name} is not more than 0: correct it.")
    if not cluster.peak_tflops:
        found.append(f"cluster.peak_tflops is empty in cluster={cluster.name}: give the dense peak of each format.")
    if found:
        raise Refused(found)


def _fits_cluster(cfg, devices: int) -> None:
    ranks = model_ranks(cfg.parallel) if cfg.parallel.dp == "auto" else world_size(cfg)
    if ranks > devices:
        nodes = -(-ranks // cfg.cluster.devices_per_node)
        smaller = [tp for tp in layouts.legal_tp(cfg) if tp * cfg.parallel.pp * cfg.parallel.cp <= devices]
        also = f", or parallel.tp={smaller[-1]}" if smaller and smaller[-1] < cfg.parallel.tp else ""
        raise Refused(
            [
                f"the layout needs {ranks} devices and cluster={cfg.cluster.name} has {devices}: "
                f"take cluster.nodes={nodes}{also}."
            ]
        )
    compute = str(cfg.precision.compute)
    if compute not in cfg.cluster.peak_tflops:
        there = " or ".join(f"precision={name}" for name in cfg.cluster.peak_tflops)
        raise Refused([f"cluster={cfg.cluster.name} names no peak for {compute}: take {there}."])
