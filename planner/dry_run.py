"""The program's own build, wrap and step functions, run as one rank under fake tensors and a fake process group.

    recorder = dry_run.rank(cfg, rank)

The answer is what `parallel.wrap`, `optim.build`, `models.loss` and `optim.clip` do, not what a formula says of them.
"""

import contextlib

import numpy as np
import torch
from megatron.core.pipeline_parallel import schedules

from models import attention, loss
from optim import build, clip
from parallel import wrap
from planner import fake_world, gpu_kernels, kinds
from planner.recorder import Recorder


def rank(cfg, number: int, micro_batches: int, settled: bool = True) -> Recorder:
    """Run two steps as rank `number` with `micro_batches` micro-batches each; what the second one did is recorded.

    The first step allocates what the optimizer keeps. Segments of the result are `build`, `zero`, `forward/C/I` and
    `backward/C/I` (model chunk C, micro-batch I), `between` (pipeline traffic, gradient reduction) and `optimizer`.
    Without `settled` there is one step, which takes half the time. Under ZeRO-2/3 the rank has to be the first of its
    data-parallel group: Megatron-FSDP compares shards with the other ranks', which are not there.
    """
    with fake_world.rank_of(cfg, number), fake_world.without_values():
        recorder = Recorder(fake_world.axis_of(), items=_item)
        with recorder:
            steps(cfg, recorder, micro_batches, settled=settled)
    return recorder


def _item(tensor):
    """What is read off a tensor decides control flow: no overflow was found, the norm is large enough to clip."""
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1


def steps(cfg, recorder: Recorder, micro_batches: int, second=None, settled: bool = True) -> None:
    """Build, wrap and run two steps under `recorder`, in whatever world there is; `second()` is called between them."""
    on_gpu = cfg.launch.device == "cuda"
    attention.install(cfg.model.attention, cfg.precision.compute)
    with gpu_kernels.used(on_gpu):
        chunks = wrap.model_chunks(cfg, torch.device("cpu"))
        optimizer = build.optimizer(cfg, chunks)
        clipper = clip.Clipper(cfg, chunks, optimizer)
        wrap.connect(chunks, optimizer, cfg)
        kinds.mark_model(recorder, chunks, optimizer)
        gpu_kernels.fuse(optimizer, on_gpu)
        _no_overflow(optimizer)
        shape = (cfg.train.micro_batch, cfg.train.seq_len + 1)
        batches = [np.zeros(shape, np.int64) for _ in range(micro_batches)]
        for step in range(0 if settled else 1, 2):
            if step and settled:
                kinds.mark_optimizer(recorder, optimizer)
                recorder.segments = {}
                if second:
                    second()
            with _segments(recorder, chunks):
                recorder.enter("zero", "temporary")
                for chunk in chunks:
                    chunk.zero_grad_buffer()
                optimizer.zero_grad()
                recorder.enter("between", "temporary")
                # The first step is there for what the optimizer keeps: the least the schedule accepts is enough.
                few = cfg.parallel.pp if cfg.parallel.vpp > 1 else 1
                loss.run(chunks, batches if step else batches[:few], cfg.train, backward=True)
                recorder.enter("optimizer", "optimizer")
                clipper.step()
            recorder.enter("end", "temporary")


@contextlib.contextmanager
def _segments(recorder: Recorder, chunks):
    """Name the segments after the micro-batches as Megatron's schedule calls for them."""
    forward, backward = schedules.forward_step, schedules.backward_step
    done: dict[str, int] = {}

    def named(kind: str, chunk: int, life: str, call, args, kwargs):
        at = f"{kind}/{chunk}"
        done[at] = done.get(at, -1) + 1
        recorder.enter(f"{at}/{done[at]}", life)
        try:
            return call(*args, **kwargs)
        finally:
            recorder.enter("between", "pipeline")

    places = {id(chunk): i for i, chunk in enumerate(chunks)}
    owner: dict[int, int] = {}

    def forward_step(step, iterator, model, *args, **kwargs):
        chunk = places[id(model)]
        out = named("forward", chunk, "activations", forward, (step, iterator, model, *args), kwargs)
        tensor = out[0][0] if isinstance(out[0], list) else out[0]
        owner[id(tensor)] = chunk
        return out

    def backward_step(input_tensor, output_tensor, *args, **kwargs):
        tensor = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
        return named(
            "backward", owner.pop(id(tensor), 0), "temporary", backward, (input_tensor, output_tensor, *args), kwargs
        )

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    try:
        yield
    finally:
        schedules.forward_step, schedules.backward_step = forward, backward


def _no_overflow(optimizer) -> None:
    """The loss scaler reads from the gradients whether they overflowed; in a plan they never do."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "grad_scaler", None) is not None:
            check = part._unscale_main_grads_and_check_for_nan
            part._unscale_main_grads_and_check_for_nan = lambda check=check: bool(check()) and False
