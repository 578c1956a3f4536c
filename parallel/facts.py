"""What is known about a run before its first step: who does what, and what memory its state takes."""

import os
import re
import resource
import shlex
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from conf.schema import Config
from parallel import host
from parallel.memory import state_gib
from tracking.console import duration


def rank_map(cfg: Config) -> str:
    """The grid in words, and for up to 16 ranks the place of each."""
    p = cfg.parallel
    world = p.tp * p.pp * p.cp * p.dp
    names = [f"{axis.upper()} {size}" for axis in ("tp", "pp", "cp", "dp") if (size := getattr(p, axis)) > 1]
    extra = ["sequence parallel"] * p.sequence_parallel + [f"{p.vpp} virtual stages"] * (p.vpp > 1)
    extra += [f"ZeRO-{p.zero}"] * (p.zero > 0)
    if world == 1:
        return ", ".join(["one process", *extra])
    title = " × ".join(names) + f" = {world} ranks" + "".join(f", {text}" for text in extra)
    if world > 16:
        return title
    places = []
    for rank in range(world):
        rest, tp = divmod(rank, p.tp)
        rest, cp = divmod(rest, p.cp)
        pp, dp = divmod(rest, p.dp)
        place = dict(tp=tp, pp=pp, cp=cp, dp=dp)
        places.append(f"{rank}: " + " ".join(f"{axis}{place[axis]}" for axis in place if getattr(p, axis) > 1))
    rows = [" | ".join(places[i : i + 4]) for i in range(0, world, 4)]
    return "\n".join([title, *rows])


def command(overrides: list[str]) -> str:
    """The command line that repeats a run; numbers that choose an option are quoted for Hydra only."""
    words = (re.sub(r"^([\w/]+)='([-+.\w]+)'$", r"\1=\2", word) for word in overrides)
    return "python train.py " + shlex.join(words)


def parameters_here(chunks) -> int:
    """Parameters of this rank before ZeRO shares them out."""
    return sum(p.numel() for chunk in chunks for p in chunk.parameters())


def memory_note(cfg: Config, chunks) -> str:
    """Model state of the fullest rank against what its device has, and whether that can work. Every rank must call."""
    largest = torch.tensor([parameters_here(chunks)], dtype=torch.long, device="cuda")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    need, has = state_gib(cfg, int(largest)), _device_gib()
    share = f"{need:.2f} GiB a rank of weights, gradients and optimizer state; "
    if torch.cuda.is_available():
        return share + f"the device has {has:.1f} GiB (activations come on top)"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return share + f"this machine has {has:.1f} GiB for {local} rank{'s' * (local > 1)} (activations come on top)"


def time_note(cfg: Config, flops_per_token: float, peak: dict | None) -> str:
    """What the run will take if it reaches half of the device's peak, which most do within a factor of two."""
    if peak is None:
        return "known after the first steps: this device's peak is not"
    tokens = cfg.train.steps * cfg.train.global_batch * cfg.train.seq_len
    seconds = tokens * flops_per_token / (0.5 * peak["tflops"] * 1e12 * dist.get_world_size())
    return f"about {duration(seconds)}, if half of the peak is reached"


def validation_note(held_out) -> str:
    """What the validation loss is taken over."""
    if held_out.count == len(held_out.samples):
        return f"all of the held-out data, {held_out.count:,} sequences"
    return (
        f"the first {held_out.count:,} of {len(held_out.samples):,} held-out sequences, always the same; "
        "train.eval_sequences=all takes every token"
    )


def _device_gib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    return host.memory()[0] / 2**30


def peak_gib() -> float:
    """Most memory this rank has had so far: of the GPU's allocator, or on a CPU of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def held_bytes() -> int:
    """Memory that this rank holds now: of the GPU's allocator, or on a CPU of the process."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return host.resident()


def room_bytes() -> int:
    """How much more this rank could get."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return host.memory()[1]


def tracker(frozen, run_dir, known: dict, done: int = 0):
    """The tracker on the rank that logs, which is the first one; elsewhere one that does nothing."""
    from tracking.silent import Silent
    from tracking.tracker import Tracker

    return Tracker(frozen, run_dir, known, done) if dist.get_rank() == 0 else Silent()


def data_rank() -> tuple[int, int]:
    """This rank's place among, and the number of, the ranks that read different samples."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
