"""Does the planner's dry run allocate and send what a real run does? Both over small configurations of every layout.

    python -m benchmarks.dry_run [case=NAME ...]

For each case real ranks (gloo, two steps) run with every storage followed from its first use to its end, and with the
collectives counted where they enter PyTorch; the dry run of the same configuration is compared with the first rank of
the first and of the last pipeline stage: model state and bytes sent per axis have to agree exactly, the peak of the
second step within 3 %. Beside it stands the CPU allocator's own count, which cannot see a block end in one of gloo's
threads. Writes benchmarks/results/dry_run.json.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.setting import ROOT, keep

SHAPE = "model=tiny model.layers=4 data=mock train.micro_batch=1 train.global_batch=8 clip=0.1"
CASES = {
    "single_fp32": "parallel=single precision=fp32",
    "single_bf16": "parallel=single precision=bf16",
    "single_fp16": "parallel=single precision=fp16 precision.initial_loss_scale=64",
    "single_math": "parallel=single precision=bf16 model.attention=math",
    "single_sgd": "parallel=single precision=bf16 optimizer=sgd",
    "single_momentum": "parallel=single precision=bf16 optimizer=momentum",
    "single_full": "parallel=single precision=bf16 parallel.recompute=full",
    "single_selective": "parallel=single precision=fp32 parallel.recompute=selective",
    "single_micro4": "parallel=single precision=bf16 train.micro_batch=4",
    "single_tied": "parallel=single precision=fp32 model.tie_embeddings=true",
    "dp2_fp32": "parallel=dp2 precision=fp32",
    "dp2_bf16_overlap": "parallel=dp2 precision=bf16 parallel.overlap=true parallel.bucket_mb=1",
    "tp2_fp16": "parallel=tp2 precision=fp16 precision.initial_loss_scale=64",
    "tp2_sp_bf16": "parallel=tp2_sp precision=bf16",
    "tp2_sp_full": "parallel=tp2_sp precision=fp32 parallel.recompute=full",
    "cp2_bf16": "parallel=cp2 precision=bf16",
    "pp2_bf16": "parallel=pp2 precision=bf16",
    "pp2_fp32_selective": "parallel=pp2 precision=fp32 parallel.recompute=selective",
    "pp2_vpp2_bf16": "parallel=pp2_vpp2 precision=bf16",
    "pp2_tied": "parallel=pp2 precision=bf16 model.tie_embeddings=true",
    "zero1_bf16": "parallel=zero1 precision=bf16",
    "zero1_overlap": "parallel=zero1 precision=fp32 parallel.overlap=true parallel.bucket_mb=1",
    "zero2_bf16": "parallel=zero2 precision=bf16",
    "zero2_fp32": "parallel=zero2 precision=fp32",
    "zero3_bf16": "parallel=zero3 precision=bf16",
    "zero3_fp16": "parallel=zero3 precision=fp16 precision.initial_loss_scale=64",
    "zero3_full": "parallel=zero3 precision=bf16 parallel.recompute=full",
    "tp2_pp2_bf16": "parallel=tp2_pp2 precision=bf16",
    "tp2_dp2_fp32": "parallel=tp2_dp2 precision=fp32",
    "tp2_zero1_bf16": "parallel=tp2_zero1 precision=bf16",
    "tp2_zero3_bf16": "parallel=tp2_zero3 precision=bf16",
    "pp2_zero1_fp32": "parallel=pp2_zero1 precision=fp32",
    "pp2_zero3_bf16": "parallel=pp2_zero3 precision=bf16",
    "cp2_zero1_bf16": "parallel=cp2 precision=bf16 parallel.zero=1 parallel.dp=2",
}


def config(words: str):
    """The checked configuration of a case."""
    from omegaconf import OmegaConf

    from parallel import compose

    composed, *_ = compose.compose(["launch.device=cpu", *SHAPE.split(), *words.split()])
    return OmegaConf.to_object(compose.check(composed))


def micro_batches(cfg) -> int:
    """Of one rank in a step."""
    return cfg.train.global_batch // (cfg.train.micro_batch * cfg.parallel.dp)


def facts(recorder, peak: int | None = None) -> dict:
    """What is compared: state by kind, peak of the step, bytes and calls by axis and collective."""
    from planner.recorder import STATE

    sent: Counter = Counter()
    for name, segment in recorder.segments.items():
        if name != "build":
            for message, count in segment.messages.items():
                sent[f"{message.axis}/{message.name}/calls"] += count
                sent[f"{message.axis}/{message.name}/bytes"] += count * message.bytes
    first = recorder.segments["zero"].trace[0][2]
    return {
        "state": dict(zip(STATE, first, strict=False)),
        "peak": max(s.peak for s in recorder.segments.values()),
        "allocator_peak": peak,
        "sent": dict(sorted(sent.items())),
    }


def real_rank(rank: int, world: int, folder: str, names: list[str]) -> None:
    """Run each case as one rank of a real gloo world and write its facts."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from parallel import cpu_as_cuda, groups, quiet
    from planner import dry_run, fake_world
    from planner.recorder import Recorder
    from precision import setup

    quiet.libraries()
    cpu_as_cuda.install()
    torch.set_num_threads(1)
    for name in names:
        cfg = config(CASES[name])
        store = f"file://{folder}/store_{name}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        groups.grid(cfg)
        setup.apply(cfg)
        recorder = Recorder(fake_world.axis_of())
        allocator = Allocator()
        with allocator, recorder:
            dry_run.steps(cfg, recorder, micro_batches(cfg), second=allocator.mark)
        Path(folder, f"{name}.{rank}").write_text(json.dumps(facts(recorder, allocator.peak())))
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        del recorder, allocator
        gc.collect()


class Allocator:
    """The CPU allocator's own account, as PyTorch's profiler gets it: every block from its beginning to its end.

    Blocks that gloo takes for itself inside a collective are left out: NCCL takes none of them, nor would they be seen
    to end, which happens in gloo's own threads.
    """

    def __enter__(self):
        from torch.profiler import ProfilerActivity, profile

        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        return self

    def __exit__(self, *error):
        self.profile.__exit__(*error)

    def mark(self) -> None:
        """The second step begins."""
        import torch

        with torch.profiler.record_function("second step"):
            pass

    def peak(self) -> int:
        """Most bytes allocated at once from the mark on."""
        changes, begins = [], 0
        stack = [(node, False) for node in self.profile.profiler.kineto_results.experimental_event_tree()]
        while stack:
            node, inside = stack.pop()
            if node.name == "second step":
                begins = node.start_time_ns
            if node.name == "[memory]":
                changes.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size, inside))
            inside = inside or node.name.startswith(("c10d::", "gloo:"))
            stack += [(child, inside) for child in node.children]
        alive: dict[int, int] = {}
        live, most = 0, 0
        for time, block, size, inside in sorted(changes):
            if size > 0 and not inside:
                alive[block] = size
                live += size
            elif size < 0:
                live -= alive.pop(block, 0)
            if time >= begins:
                most = max(most, live)
        return most


def compare(names: list[str]) -> dict:
    """Real and dry facts of every case, by name."""
    from parallel import quiet

    quiet.libraries()
    from parallel.resolve import world_size
    from planner import dry_run, fake_world

    cfgs = {name: config(CASES[name]) for name in names}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in sorted({world_size(cfg) for cfg in cfgs.values()}):
            here = [name for name in names if world_size(cfgs[name]) == world]
            command = [sys.executable, "-m", "benchmarks.dry_run", "--rank"]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            ranks = [
                subprocess.Popen([*command, str(rank), str(world), folder, *here], cwd=ROOT, env=env)
                for rank in range(world)
            ]
            if any([rank.wait() for rank in ranks]):
                raise SystemExit(f"a real rank of {here} failed")
            for name in here:
                for rank in sorted({fake_world.coordinates(cfgs[name], s) for s in (0, cfgs[name].parallel.pp - 1)}):
                    real = json.loads(Path(folder, f"{name}.{rank}").read_text())
                    dry = facts(dry_run.rank(cfgs[name], rank, micro_batches(cfgs[name])))
                    results[f"{name}/{rank}"] = {"real": real, "dry": dry}
                    print(line(f"{name}/{rank}", real, dry), flush=True)
    return results


def line(name: str, real: dict, dry: dict) -> str:
    """One row of the table."""
    state = "exact" if real["state"] == dry["state"] else f"DIFFERS {real['state']} {dry['state']}"
    sent = "exact" if real["sent"] == dry["sent"] else f"DIFFERS {real['sent']} {dry['sent']}"
    off = {name: dry["peak"] / real[name] - 1 for name in ("peak", "allocator_peak")}
    far = " MORE THAN 3 %" if abs(off["peak"]) > 0.03 else ""
    return (
        f"{name:24} peak {real['peak'] / 2**20:8.2f} MiB, planned {off['peak']:+.2%} ({off['allocator_peak']:+.2%} of "
        f"the allocator's){far}; state {state}; bytes sent {sent}"
    )


def main(words: list[str]) -> None:
    """Compare and write."""
    names = [word.removeprefix("case=") for word in words if word.startswith("case=")] or list(CASES)
    results = compare(names)
    for peak in ("peak", "allocator_peak"):
        off = sorted(abs(r["dry"]["peak"] / r["real"][peak] - 1) for r in results.values())
        print(f"{len(results)} ranks: {peak} off by {off[len(off) // 2]:.2%} in the median, {off[-1]:.2%} at most")
    if len(names) == len(CASES) and "write=false" not in words:
        keep("dry_run", ranks=results)
    differing = [
        name for name, r in results.items() if any(r["real"][key] != r["dry"][key] for key in ("state", "sent"))
    ]
    if differing:
        sys.exit(f"Model state or bytes sent are not those of the real run: {', '.join(differing)}.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        real_rank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
    else:
        main(sys.argv[1:])
