"""What train.py's loop and the CPU stand-in cost over Megatron-core's bare forward, backward and optimizer step.

    python -m benchmarks.overhead [steps=60] [override ...]

The real train.py runs one process; after each of its steps a second, identical model makes one bare step (Megatron's
schedule, gradient reduction and `optimizer.step()` with clipping, fixed tokens, nothing measured or logged). So the two
alternate on the same machine in the same state. A step of train.py is everything between two bare ones: data, schedule,
clipping with its metrics, metrics.jsonl and console. Medians, and the spread between the quartiles, are printed and
written to benchmarks/results/overhead.json.

The stand-in is in both. Its cost is the number of wrapped calls in a bare step times what wrapping adds to a call.
"""

import contextlib
import dataclasses
import io
import runpy
import statistics
import sys
import tempfile
import time
import timeit
from collections import Counter
from pathlib import Path

from benchmarks.setting import ROOT, keep, only_rank

WARM_UP = 5


def main(words: list[str]) -> None:
    """Run, print, write."""
    steps = next((int(word.partition("=")[2]) for word in words if word.startswith("steps=")), 60)
    words = [word for word in words if not word.startswith("steps=")]
    from parallel import compose
    from parallel.frozen import load

    folder = tempfile.mkdtemp()
    overrides = ["parallel=single", "launch.device=cpu", "tracking.mode=disabled", "train.sample_length=0", *words]
    overrides += [f"train.steps={steps + WARM_UP}", f"train.eval_every={steps + WARM_UP}"]
    cfg, choices, task, _ = compose.compose(overrides)
    compose.freeze(compose.check(cfg), folder, choices, task)
    frozen = load(folder)
    only_rank()

    bare = Bare(frozen.cfg)
    times = alternate(folder, bare, frozen.cfg.train.steps)
    report(frozen, times, bare)


class Bare:
    """A second model of the same shape and one bare Megatron step on it."""

    def __init__(self, cfg):
        self.cfg, self.ready = cfg, False
        self.calls = Counter()

    def build(self) -> None:
        import torch
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from optim import build
        from parallel import wrap

        cfg, t = self.cfg, self.cfg.train
        self.chunk = wrap.model_chunks(cfg, torch.device("cpu"))[0]
        config = build.optimizer(cfg, [self.chunk]).config
        config = dataclasses.replace(config, clip_grad=cfg.clip.max_norm)
        self.optimizer = get_megatron_optimizer(config, [self.chunk], use_gloo_process_groups=False)
        wrap.connect([self.chunk], self.optimizer, cfg)
        self.batches = list(
            torch.randint(0, cfg.model.vocab, (t.global_batch // t.micro_batch, t.micro_batch, t.seq_len))
        )
        self.positions = torch.arange(t.seq_len).unsqueeze(0)
        self.forward_backward = get_forward_backward_func()
        self.ready = True

    def forward(self, batches, model):
        tokens = next(batches)
        loss = model(input_ids=tokens, position_ids=self.positions, attention_mask=None, labels=tokens)
        return loss, lambda output: (output.float().mean(), None)

    def step(self) -> None:
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.forward_backward(
            forward_step_func=self.forward,
            data_iterator=iter(self.batches),
            model=self.chunk,
            num_microbatches=len(self.batches),
            seq_length=self.cfg.train.seq_len,
            micro_batch_size=self.cfg.train.micro_batch,
            forward_only=False,
        )
        self.optimizer.step()


def alternate(folder: str, bare: Bare, steps: int) -> dict[str, list[float]]:
    """Run train.py's `rank` with a bare step behind each of its own; seconds of each, without the warm-up."""
    from tracking.tracker import Tracker

    times = {"train.py": [], "bare": []}
    log, mark = Tracker.log, [0.0]

    def log_and_step(self, step, metrics, histograms=None):
        log(self, step, metrics, histograms)
        logged = time.perf_counter()
        if not bare.ready:
            bare.build()
        elif "train/loss" in metrics and step > WARM_UP:
            times["train.py"].append(logged - mark[0])
        start = time.perf_counter()
        bare.step()
        end = time.perf_counter()
        if "train/loss" in metrics and step > WARM_UP:
            times["bare"].append(end - start)
        mark[0] = end
        if step == steps and not bare.calls:
            bare.calls = wrapped_calls(bare.step)
        print(f"\rstep {step} of {steps}", end="", file=sys.stderr, flush=True)

    Tracker.log = log_and_step
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(ROOT / "train.py"), run_name="train")["rank"](Path(folder))
    print(file=sys.stderr)
    return times


def wrapped_calls(run) -> Counter:
    """How often `run()` calls a function that the stand-in has wrapped, by name."""
    import torch

    from parallel import cpu_as_cuda

    places = [(torch, name) for name in cpu_as_cuda.FACTORIES] + [(torch.Tensor, name) for name in cpu_as_cuda.NEW]
    places += [(torch.Tensor, "to"), (torch.Tensor, "type")]
    calls = Counter()

    def counting(name, function):
        def count(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return count

    wrapped = {(owner, name): getattr(owner, name) for owner, name in places}
    for (owner, name), function in wrapped.items():
        setattr(owner, name, counting(name, function))
    try:
        run()
    finally:
        for (owner, name), function in wrapped.items():
            setattr(owner, name, function)
    return calls


def wrapping_s() -> float:
    """Seconds that wrapping adds to one call, of the dearest kind: a factory with a device to translate."""
    import torch

    calls = 20_000
    wrapped = lambda: torch.empty(1, device="cuda")  # noqa: E731
    bare = lambda: torch.empty.__wrapped__(1, device="cpu")  # noqa: E731
    added = [timeit.timeit(wrapped, number=calls) - timeit.timeit(bare, number=calls) for _ in range(5)]
    return statistics.median(added) / calls


def report(frozen, times: dict[str, list[float]], bare: Bare) -> None:
    """Print the table and write it with configuration and versions."""

    median = {name: statistics.median(values) for name, values in times.items()}
    ratios = [ours / theirs for ours, theirs in zip(times["train.py"], times["bare"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    calls, each = sum(bare.calls.values()), wrapping_s()
    found = {
        "steps": len(ratios),
        "train.py_step_s": median["train.py"],
        "bare_step_s": median["bare"],
        "loop_overhead": middle - 1,
        "loop_overhead_quartiles": [low - 1, high - 1],
        "stand_in_calls_per_step": calls,
        "stand_in_s_per_call": each,
        "stand_in_overhead": calls * each / median["bare"],
        "overrides": frozen.overrides,
        "config_hash": frozen.config_hash,
    }
    print(f"train.py's step  {median['train.py'] * 1e3:8.2f} ms (median of {len(ratios)})")
    print(f"bare Megatron    {median['bare'] * 1e3:8.2f} ms, alternating with it")
    print(f"loop             {found['loop_overhead']:8.2%} more (quartiles {low - 1:.2%} to {high - 1:.2%})")
    print(f"stand-in         {found['stand_in_overhead']:8.2%} of it: {calls} wrapped calls, {each * 1e6:.2f} us each")
    keep("overhead", **found)


if __name__ == "__main__":
    main(sys.argv[1:])
