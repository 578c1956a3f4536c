"""Known failures are explained by their true cause, with what to try: recorded texts, and failures that happen here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.explain import explain
from tracking.growth import BLOCK, BLOCKS, Growth
from tracking.result import write

REPO = Path(__file__).resolve().parent.parent
MIB = 2**20
SMALL = (
    "launch.device=cpu train.global_batch=4 train.micro_batch=2 train.seq_len=64 train.sample_length=0 "
    "train.eval_sequences=4 model.layers=2 model.hidden=64 model.ffn_hidden=128 model.heads=4 model.kv_heads=2 "
    "tracking.mode=disabled"
).split()

# What PyTorch, CUDA, NCCL, gloo, the kernel and other trainers write; what has to be said, and what to try.
TEXTS = {
    "CUDA 700": (
        "failed",
        "rank 3: AcceleratorError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
        "asynchronously reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging "
        "consider passing CUDA_LAUNCH_BLOCKING=1",
        "address outside its tensors",
        "CUDA_LAUNCH_BLOCKING=1",
    ),
    "CUDA 700 by number": ("failed", "rank 0: OSError: (External) CUDA error(700), an illegal ...", "address", "BLOCK"),
    "device-side assert": (
        "failed",
        "rank 1: RuntimeError: CUDA error: device-side assert triggered",
        "token id beyond the vocabulary",
        "CUDA_LAUNCH_BLOCKING=1",
    ),
    "the same on a CPU": ("failed", "rank 1: IndexError: index out of range in self", "token id beyond", "BLOCKING"),
    "NCCL watchdog": (
        "timeout",
        "a collective waited in vain: rank 2 in 'step 7'; rank 0 in 'step 7, computing'; rank 0 gave up: "
        "DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=31, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.",
        "a rank that did not come",
        "launch.collective_timeout_s=3600",
    ),
    "gloo": (
        "timeout",
        "rank 0: RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv "
        "operation to complete",
        "a rank that did not come",
        "launch.collective_timeout_s=3600",
    ),
    "a peer that is gone": (
        "failed",
        "rank 0: RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:41234",
        "another rank ended first",
        None,
    ),
    "old driver": (
        "failed",
        "rank 0: RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "do not fit together",
        "launch.device=cpu",
    ),
    "NCCL's own": (
        "failed",
        "rank 0: DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.7\nncclUnhandledCudaError: Call to CUDA function failed.",
        "NCCL",
        "NCCL_DEBUG=INFO",
    ),
    "two ranks on a GPU": (
        "failed",
        "rank 1: DistBackendError: NCCL error in: NCCLUtils.cpp:93, invalid usage\nLast error:\nDuplicate GPU "
        "detected : rank 1 and rank 0 both on CUDA device 1000",
        "two ranks on one GPU",
        "NCCL_DEBUG=INFO",
    ),
    "cuBLAS": (
        "failed",
        "rank 0: RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "no memory for its workspace",
        "train.micro_batch=1",
    ),
    "port": (
        "failed",
        "rank 0: DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "another program listens on the port",
        None,
    ),
    "rendezvous": (
        "failed",
        "rank 1: DistNetworkError: The client socket has timed out after 60000ms while trying to connect to "
        "(10.0.0.1, 29500).",
        "did not find each other",
        "SOCKET_IFNAME",
    ),
    "full disk": (
        "failed",
        "rank 0: BadCheckpoint: No checkpoint was written: runs/x cannot be written: No space left on device.",
        "the disk is full",
        "hydra.run.dir",
    ),
    "shared memory": (
        "failed",
        "rank 0: RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space",
        "/dev/shm is too small",
        "NCCL_SHM_DISABLE",
    ),
    "loss scale at its minimum": (
        "failed",
        "rank 0: Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        "overflows even with the smallest loss scale",
        "precision=bf16",
    ),
    "a killed rank": (
        "failed",
        "rank 1: killed by SIGKILL from outside (the kernel counts no kill for lack of memory) (log: ranks/rank1.log)",
        "ended this rank",
        "checkpoint.every=100",
    ),
    "time that is up": (
        "timeout", "not finished after train.timeout_s=60; rank 1 in 'step 6'", "was up", "train.timeout_s=120",
    ),
}  # fmt: skip
OUT_OF_MEMORY = (
    "rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB "
    "of which 1.2 GiB is free. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF"
)


@pytest.mark.parametrize("name", TEXTS)
def test_a_recorded_failure_is_explained(name, cfg_of, tmp_path):
    status, text, said, tried = TEXTS[name]
    found = explain(status, text, cfg_of("parallel=tp2", "train.timeout_s=60"), tmp_path)
    assert said in found.sentence, found
    assert found.advice is None if tried is None else tried in found.advice, found
    assert "parallel=tp2: tp=2" in found.sentence, "the layout is not named"
    if "rank" in text:
        assert "(rank " in found.sentence, "the rank is not named"


def test_the_missing_rank_is_named_and_not_the_one_that_complains(cfg_of, tmp_path):
    status, text, *_ = TEXTS["NCCL watchdog"]
    assert "(rank 2, parallel=" in explain(status, text, cfg_of(), tmp_path).sentence


def test_an_unknown_failure_is_not_explained(cfg_of, tmp_path):
    assert explain("failed", "rank 0: ValueError: something else", cfg_of(), tmp_path) is None
    assert explain("interrupted", "stopped by SIGINT", cfg_of(), tmp_path) is None


def test_memory_that_runs_out_is_told_apart_by_when_and_how(cfg_of, tmp_path):
    cfg = cfg_of("train.micro_batch=4")
    at_once = explain("oom", OUT_OF_MEMORY, cfg, tmp_path)
    assert "before the first step" in at_once.sentence and at_once.advice == "train.micro_batch=2"
    lines = (json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in range(200))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    later = explain("oom", OUT_OF_MEMORY, cfg, tmp_path)
    assert "199 steps" in later.sentence and "fragmented" in later.sentence and "expandable_segments" in later.advice
    (tmp_path / "doctor").mkdir()
    write(tmp_path / "doctor", "memory-rank1.json", rank=1, step=100, mib_per_step=12.5, held_gib=2.0, steps_left=50)
    leak = explain("oom", OUT_OF_MEMORY, cfg, tmp_path)
    assert "12.5 MiB with every step on rank 1" in leak.sentence and "graph" in leak.sentence


def watched(tmp_path, held, room=1 << 30, last=1000) -> list[str]:
    """What is said while memory goes through `held`."""
    growth = Growth(tmp_path, 0, lambda: room)
    return [said for step, bytes_ in enumerate(held, 1) if (said := growth.add(step, int(bytes_), last))]


def test_memory_that_grows_with_every_step_is_warned_about_once_and_early(tmp_path):
    said = watched(tmp_path, (600 * MIB + 2 * MIB * step for step in range(300)))
    assert len(said) == 1 and "grows by 2.0 MiB with every step" in said[0] and "about 512 more steps" in said[0]
    assert json.loads((tmp_path / "doctor" / "memory-rank0.json").read_text())["step"] == BLOCK * BLOCKS


@pytest.mark.parametrize(
    "held",
    [
        [600 * MIB + (step * 7919 % 41) * MIB for step in range(500)],  # noise
        [600 * MIB + min(step, 40) * 20 * MIB for step in range(500)],  # a start that takes its time
        [600 * MIB + step // 100 * 200 * MIB for step in range(500)],  # evaluations that each need more
        [600 * MIB + step * MIB // 20 for step in range(500)],  # a trifle
        [40_000 * MIB + step * MIB for step in range(500)],  # enough for all steps, and little of what is held
    ],
    ids=["noise", "start", "stairs", "trifle", "enough"],
)
def test_memory_of_a_healthy_run_is_not_warned_about(held, tmp_path):
    assert watched(tmp_path, held, room=4000 * MIB, last=500) == []


@pytest.mark.slow
def test_a_run_that_keeps_its_graphs_is_warned_and_explained(tmp_path, plain_env):
    done = faulty(tmp_path, plain_env, "leak", "parallel=single", "train.steps=2000", limit_mib=6500)
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome["status"] == "oom", outcome["cause"]
    assert "grows by" in done.stdout and "with every step on rank 0" in outcome["explanation"], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "zero3"])
def test_a_healthy_run_is_not_warned(layout, tmp_path, train):
    words = [f"parallel={layout}", "train.steps=300", "train.eval_every=50", "checkpoint.every=60"]
    done = train(*SMALL, *words, "hydra.run.dir=run", timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "grows by" not in done.stdout and not (tmp_path / "run" / "doctor").exists()


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_said_to(tmp_path, plain_env):
    words = "parallel=single model.hidden=2048 model.ffn_hidden=8192 model.heads=16 model.kv_heads=16 model.layers=12"
    faulty(tmp_path, plain_env, "none", *words.split(), limit_mib=6000)
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome["status"] == "oom", outcome["cause"]
    assert "do not fit" in outcome["explanation"] and outcome["advice"]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_as_missing(tmp_path, plain_env):
    words = ["parallel=dp2", "train.steps=1000", "launch.collective_timeout_s=6"]
    done = faulty(tmp_path, plain_env, "hang", *words)
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome["status"] == "timeout", outcome["cause"]
    assert outcome["cause"].startswith("a collective waited in vain: rank 1 in 'step 3'"), outcome["cause"]
    assert "(rank 1, parallel=dp2: dp=2)" in outcome["explanation"]
    assert f"try: {outcome['advice']}" in done.stderr


@pytest.mark.slow
def test_a_rank_that_is_killed_is_explained(tmp_path, plain_env):
    done = faulty(tmp_path, plain_env, "killed", "parallel=dp2", "train.steps=1000")
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome["status"] == "failed" and "rank 1: killed by SIGKILL" in outcome["cause"]
    assert outcome["advice"] == "checkpoint.every=100" and "why: " in done.stderr


@pytest.mark.slow
def test_a_loss_scale_at_its_floor_ends_as_nan_with_another_format_to_try(tmp_path, plain_env):
    words = ["parallel=single", "precision=fp16", "train.steps=60", "precision.min_loss_scale=65536"]
    words += ["precision.initial_loss_scale=65536", "precision.hysteresis=1"]
    faulty(tmp_path, plain_env, "overflow", *words)
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome["status"] == "nan" and outcome["advice"] == "precision=bf16", outcome["cause"]
    assert "overflows" in outcome["cause"] and "loss scale 65536, which is its minimum" in outcome["cause"]


@pytest.mark.slow
def test_a_full_disk_is_explained(tmp_path, plain_env):
    words = ["parallel=single", "train.steps=3", "checkpoint.every=2"]
    faulty(tmp_path, plain_env, "full disk", *words)
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert outcome["status"] == "failed" and "the disk is full" in outcome["explanation"], outcome["cause"]


def faulty(folder: Path, env: dict, fault: str, *words: str, limit_mib: int | None = None):
    """Run train.py with a fault in its ranks (faulty_train.py), perhaps with less memory than there is."""
    command = [sys.executable, str(REPO / "tests" / "faulty_train.py"), fault, *SMALL, *words, "hydra.run.dir=run"]
    limit = ["prlimit", f"--as={limit_mib * MIB}"] if limit_mib else []
    done = subprocess.run([*limit, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    return done
