"""Ranks that train a few steps again and again, each time with another fault, and keep what the doctor says.

    python doctor_rank.py RUN_DIR      RUN_DIR/faults.json lists the faults, RUN_DIR/LAYOUT holds the frozen layouts

A fault is {"layout", "kind", "where", "rank", "step"}. What it does stays, as a fault of the code would, so that it is
there when the batch is computed once more; only "reduced" passes, as a fault of the machine would.
"""

import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from parallel import rank_process
from parallel.frozen import load


def gpt(chunk):
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def spoil(tensor, value: float = math.nan):
    """A copy with one element that is not finite."""
    tensor = tensor.clone()
    tensor.view(-1)[tensor.numel() // 2] = value
    return tensor


class Fault:
    """One fault and how it gets in."""

    def __init__(self, kind: str, where: str, chunks, optimizer, cfg):
        self.kind, self.where, self.cfg = kind, where, cfg
        self.chunks, self.optimizer, self.handles = chunks, optimizer, []

    def module(self):
        """The module that `where` names, if this rank has it; layers are counted over the whole model."""
        for chunk in self.chunks:
            model = gpt(chunk)
            for name, module in model.named_modules():
                if name.startswith("decoder.layers."):
                    _, _, number, *rest = name.split(".")
                    name = ".".join(["decoder.layers", str(model.decoder.layers[int(number)].layer_number - 1), *rest])
                if name == self.where:
                    return module
        raise KeyError(self.where)

    @torch.no_grad()
    def before(self) -> None:
        """What is done before the step."""
        from parallel import checkpoint_state as state
        from precision.first_bad import _place_name

        if self.kind in ("weight", "exp_avg_sq"):
            for part in state.owned(self.chunks, self.optimizer, self.cfg.parallel.zero):
                if _place_name(part.places, part.start) == self.where:
                    held = part.master if self.kind == "weight" else part.rule.state[part.master][self.kind]
                    state.local(held)[3] = math.nan
            if self.kind == "weight" and self.cfg.parallel.zero != 1:
                state.install_masters(self.chunks, self.optimizer, self.cfg.parallel.zero)
        elif self.kind == "activation":
            hook = lambda module, args, out: spoil(out) if torch.is_tensor(out) else (spoil(out[0]), *out[1:])  # noqa: E731
            self.handles.append(self.module().register_forward_hook(hook))
        elif self.kind == "gradient":  # what the module hands back

            def on_input(module, args):
                fresh = args[0].view_as(args[0]) if args[0].requires_grad else args[0]
                if fresh.requires_grad:
                    fresh.register_hook(lambda g: spoil(g, math.inf))
                return (fresh, *args[1:])

            self.handles.append(self.module().register_forward_pre_hook(on_input))
        elif self.kind == "weight gradient":

            def with_weight(module, args):
                self.handles.append(module.weight.register_hook(spoil))

            self.handles.append(self.module().register_forward_pre_hook(with_weight))

    def batch(self, micro_batches):
        """The step's batch."""
        if self.kind == "batch":
            micro_batches = [tokens.copy() for tokens in micro_batches]
            micro_batches[1][0, 5] = 300
        return micro_batches

    def after_backward(self) -> None:
        """What is done between backward pass and update."""
        if self.kind == "reduced":
            p = next(p for chunk in self.chunks for p in chunk.parameters() if p.places[0].key == self.where)
            p.main_grad.view(-1)[:].fill_(math.nan)

    def end(self) -> None:
        for handle in self.handles:
            handle.remove()


def run(cfg, folder: Path, device, fault: dict) -> str:
    """Train until the doctor says something; that."""
    from data.batches import Batches, Mock
    from models import loss
    from optim import build, clip
    from parallel import facts, wrap
    from parallel.checkpoint import Checkpoints
    from precision.nonfinite import BadBatch, Doctor

    chunks = wrap.model_chunks(cfg, device)
    optimizer = build.optimizer(cfg, chunks)
    schedule = build.schedule(cfg, optimizer)
    wrap.connect(chunks, optimizer, cfg)
    clipper = clip.Clipper(cfg, chunks, optimizer)
    checkpointed = cfg, folder, chunks, optimizer, schedule, clipper
    doctor = Doctor(cfg, folder, chunks, optimizer, Checkpoints(*checkpointed))
    batches = Batches(Mock(cfg.model.vocab, cfg.train.seq_len, 0), cfg.train, *facts.data_rank(), 1)
    inject = Fault(fault["kind"], fault["where"], chunks, optimizer, cfg)
    try:
        for step in range(1, 6):
            here = step == fault["step"] and dist.get_rank() == fault["rank"]
            micro_batches = batches.step(step - 1)
            doctor.take(step, inject.batch(micro_batches) if here else micro_batches)
            if step == fault["step"] and (here or fault["kind"] == "weight"):
                inject.before() if here else share(chunks, optimizer, cfg)
            schedule.step(1)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            scale = optimizer.get_loss_scale().item()
            found, update = loss.run(chunks, doctor.batch, cfg.train, backward=True), clip.LEFT_OUT
            if here:
                inject.after_backward()
            if math.isfinite(found):
                update = clipper.step()
            if seen := doctor.finds(found, update, optimizer.param_groups[0]["lr"], scale):
                doctor.treat(seen)
        return "nothing"
    except (FloatingPointError, BadBatch) as end:
        return str(end)
    finally:
        inject.end()
        batches.close()


def share(chunks, optimizer, cfg) -> None:
    """The other ranks' part in handing a damaged weight out, where that is a collective."""
    from parallel import checkpoint_state as state

    if cfg.parallel.zero >= 2:
        state.install_masters(chunks, optimizer, cfg.parallel.zero)


def regrid(cfg) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    p = cfg.parallel
    parallel_state.initialize_model_parallel(
        p.tp,
        p.pp,
        p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(cfg.train.seed)


def main(run_dir: Path) -> None:
    from models import attention
    from parallel import groups, quiet, stacks  # noqa: F401

    quiet.libraries()
    faults = json.loads((run_dir / "faults.json").read_text())
    device, said = None, {}
    for name, fault in faults.items():
        cfg = load(run_dir / fault["layout"]).cfg
        if device is None:
            device = groups.start(cfg)
        else:
            regrid(cfg)
        attention.install(cfg.model.attention, cfg.precision.compute)
        folder = run_dir / name.replace(" ", "_")
        said[name] = run(cfg, folder, device, fault)
        dist.barrier()
    (run_dir / f"said{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    rank_process.run(main, Path(sys.argv[1]))
