"""What a failure means: its true cause in one sentence, and the overrides to try, from the error's text and the run.

Texts are matched as PyTorch, NCCL, gloo, CUDA and the kernel write them. Nothing here imports torch.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from parallel import memory
from precision.diagnosis import REPORT
from tracking import history
from tracking.result import DOCTOR

MANY_STEPS = 10  # memory that runs out later was enough at first


@dataclass
class Explanation:
    """A sentence, and overrides or a command to paste (None where there is nothing to paste)."""

    sentence: str
    advice: str | None


def explain(status: str, cause: str, cfg, run_dir: Path) -> Explanation | None:
    """What is known about a failure; None when it is not one of the known ones.

    `cause` is the line of result.json, or the whole error text.
    """
    if status == "nan":
        return _nan(run_dir)
    if status == "interrupted":
        return None
    rank = re.search(r"\brank (\d+)", cause)
    where = f" ({f'rank {rank.group(1)}, ' if rank else ''}parallel={cfg.parallel.name}: {_sizes(cfg)})"
    if status == "oom":
        found = _out_of_memory(cause, cfg, run_dir)
    else:
        found = next((known(cfg) for pattern, known in KNOWN if re.search(pattern, cause, re.IGNORECASE)), None)
    return found and Explanation(found.sentence + where, found.advice)


def _sizes(cfg) -> str:
    p = cfg.parallel
    sizes = [f"{axis}={getattr(p, axis)}" for axis in ("tp", "pp", "cp", "dp") if getattr(p, axis) not in (1, "auto")]
    return " ".join(sizes + [f"zero={p.zero}"] * (p.zero > 0)) or "one process"


def _nan(run_dir: Path) -> Explanation | None:
    try:
        report = json.loads((run_dir / DOCTOR / REPORT).read_bytes())
        return Explanation(report["differs"] or report["because"], report["advice"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def steps_done(run_dir: Path) -> int:
    """The last step in metrics.jsonl."""
    try:
        return max((line["step"] for line in history.read(run_dir)), default=0)
    except (OSError, ValueError):
        return 0


def grown(run_dir: Path) -> dict | None:
    """What the first rank noticed whose memory grew from step to step (tracking.growth)."""
    for file in sorted((run_dir / DOCTOR).glob("memory-rank*.json")):
        try:
            return json.loads(file.read_bytes())
        except (OSError, ValueError):
            continue
    return None


def _out_of_memory(cause: str, cfg, run_dir: Path) -> Explanation:
    done, growth = steps_done(run_dir), grown(run_dir)
    less = memory.tries(cfg)
    if growth:
        return Explanation(
            f"memory grew by {growth['mib_per_step']:.1f} MiB with every step on rank {growth['rank']} until it ran out"
            f" after step {done}: something keeps each step's graph or output, such as a loss summed without .item(). "
            "Claim 16 would free gradients more often; they are freed already, and a smaller batch only delays it",
            None,
        )
    if done < MANY_STEPS:
        when = "before the first step was done" if done == 0 else f"after {done} steps"
        return Explanation(f"the model and its activations do not fit: memory ran out {when}", less[0])
    if "reserved by PyTorch but unallocated" in cause or "CUDA out of memory" in cause:
        return Explanation(
            f"memory was enough for {done} steps and did not grow steadily: it is fragmented, or one step needed more",
            "+parallel.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    return Explanation(
        f"memory was enough for {done} steps and did not grow steadily: one moment needed more (evaluation, "
        "checkpoint, sample), or another program on this machine took it",
        less[0],
    )


def _known(sentence: str, advice=None):
    return lambda cfg: Explanation(sentence, advice(cfg) if callable(advice) else advice)


def _blocking(cfg) -> str:
    return "+parallel.env.CUDA_LAUNCH_BLOCKING=1"


# First match counts, so the more special ones come first.
KNOWN = [
    (
        r"index out of range in self|device-side assert triggered|srcIndex < srcSelectDimSize",
        _known(
            "an index outside its table, nearly always a token id beyond the vocabulary or a position beyond "
            "max_positions; the line after CUDA_LAUNCH_BLOCKING=1 is the true one",
            _blocking,
        ),
    ),
    (
        r"illegal memory access|CUDA error\(?:? ?\(?700|cudaErrorIllegalAddress",
        _known(
            "a kernel used an address outside its tensors: an index beyond a table (token id, position) or a faulty "
            "kernel. Claim 14 says FP16 overflow, but overflow gives Inf or NaN, never a bad address",
            _blocking,
        ),
    ),
    (
        r"driver version is insufficient|NVIDIA driver on your system is too old|no kernel image is available|"
        r"forward compatibility was attempted",
        _known(
            "PyTorch's CUDA and this machine's driver or GPU do not fit together; `python -m parallel.check` says "
            "which version is wanted",
            "launch.device=cpu",
        ),
    ),
    (
        r"NCCL version|undefined symbol: nccl|NCCL error.*(invalid usage|internal error)|Duplicate GPU",
        _known(
            "NCCL was called in a way it refuses: two ranks on one GPU, ranks with different NCCL versions, or "
            "another libnccl than PyTorch was built with",
            "+parallel.env.NCCL_DEBUG=INFO",
        ),
    ),
    (
        r"unhandled cuda error|unhandled system error",
        _known(
            "NCCL met an error of CUDA or of the system (shared memory, network interface); its log names it",
            "+parallel.env.NCCL_DEBUG=INFO",
        ),
    ),
    (
        r"CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)",
        _known(
            "cuBLAS got no memory for its workspace: the GPU is full, by this run or by another program",
            lambda cfg: memory.tries(cfg)[0],
        ),
    ),
    (
        r"watchdog caught collective|timed out waiting|wait timeout|did not come",
        _known(
            "a collective waited for a rank that did not come: one that hangs, is slow (data, evaluation, checkpoint) "
            "or took another branch. Claim 15 would change the bucket size; that is in no known case the cure",
            lambda cfg: f"launch.collective_timeout_s={2 * cfg.launch.collective_timeout_s:g}",
        ),
    ),
    (
        r"not finished after train\.timeout_s",
        _known(
            "the time that train.timeout_s allows was up",
            lambda cfg: f"train.timeout_s={2 * cfg.train.timeout_s:g}" if cfg.train.timeout_s else None,
        ),
    ),
    (
        r"address already in use|EADDRINUSE",
        _known("another program listens on the port at which the ranks meet; here the system chooses a free one", None),
    ),
    (
        r"connectFullMesh failed|Connect timeout|client socket has timed out|failed to connect|rendezvous|"
        r"cannot meet the others",
        _known(
            "the ranks did not find each other: a rank that never started, a wrong MASTER_ADDR, a firewall, or the "
            "wrong network interface",
            "+parallel.env.GLOO_SOCKET_IFNAME=eth0 +parallel.env.NCCL_SOCKET_IFNAME=eth0",
        ),
    ),
    (
        r"closed by peer|reset by peer|broken pipe|remote process exited|socket closed",
        _known("another rank ended first and left no error: its own log, and the kernel's, say more", None),
    ),
    (
        r"No space left on device",
        _known("the disk is full", "hydra.run.dir=PATH_ON_ANOTHER_DISK checkpoint.keep=1"),
    ),
    (
        r"bus error|insufficient shared memory|unable to allocate shared memory",
        _known(
            "/dev/shm is too small; start the container with --shm-size=8g or --ipc=host",
            "+parallel.env.NCCL_SHM_DISABLE=1",
        ),
    ),
    (
        r"loss scale already at minimum|Minimum loss scale reached",
        _known("the gradient overflows even with the smallest loss scale: FP16 cannot hold it", "precision=bf16"),
    ),
    (
        r"killed by SIGKILL from outside",
        _known(
            "somebody or a batch system ended this rank; the others were stopped because they cannot go on without it",
            lambda cfg: "checkpoint.resume=auto" if cfg.checkpoint.every else "checkpoint.every=100",
        ),
    ),
    (
        r"killed by SIG(SEGV|BUS|ABRT|ILL)",
        _known("a crash inside compiled code; the rank's log ends with the stack of every thread", None),
    ),
]
