"""What a rank keeps between two steps, as tensors it owns: master weights, the optimizer's moments, generators.

Every kind of data parallelism keeps them elsewhere; `owned` finds them in each, and they are views, so that reading
into them restores them. Numbers that are the same on all ranks (update count, loss scale) go beside them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from conf.schema import OptimizerName
from parallel.checkpoint_io import MASTER, Piece, Pieces
from parallel.checkpoint_map import Box, Place, boxes

MOMENTS = {
    OptimizerName.sgd: (),
    OptimizerName.momentum: ("momentum_buffer",),
    OptimizerName.rmsprop: ("square_avg",),
    OptimizerName.adagrad: ("sum",),
    OptimizerName.adam: ("exp_avg", "exp_avg_sq"),
    OptimizerName.adamw: ("exp_avg", "exp_avg_sq"),
    OptimizerName.lamb: ("exp_avg", "exp_avg_sq"),
    OptimizerName.lion: ("exp_avg",),
    # These keep different ones of different parameters, and have made them.
    OptimizerName.adafactor: ("variance",),
    OptimizerName.muon: ("momentum_buffer", "exp_avg", "exp_avg_sq"),
}
MADE = (OptimizerName.adafactor, OptimizerName.muon)


@dataclass
class Owned:
    """The flat range [start, end) of one parameter that this rank updates."""

    places: list[Place]
    start: int
    end: int
    # The master weights of the range, as the optimizer holds them, and the torch optimizer that does.
    master: torch.Tensor
    rule: torch.optim.Optimizer


def optimizers(optimizer) -> list:
    """Megatron's optimizers with parameters of this rank; it chains several and stubs those that have none."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def owned(chunks, optimizer, zero: int) -> Iterator[Owned]:
    """Every parameter of which this rank updates something, and what of it."""
    parts = optimizers(optimizer)
    if zero == 1:
        for part in parts:
            for p in part.model_param_gbuf_map:
                held, (group, order) = part._get_model_param_range_map(p)["param"], part.model_param_group_index_map[p]
                master = part.optimizer.param_groups[group]["params"][order]
                yield Owned(p.places, held.start, held.end, master, part.optimizer)
        return
    rule = {id(p): part.optimizer for part in parts for group in part.optimizer.param_groups for p in group["params"]}
    for chunk in chunks:
        if zero >= 2:
            for _, p in chunk.module.param_and_grad_buffer.optimizer_named_parameters:
                if local(p).numel():
                    held = p.megatron_fsdp_slice
                    yield Owned(p.orig_param.places, held.start, held.stop, p, rule[id(p)])
        else:
            for p in chunk.parameters():
                master = getattr(p, "main_param", p)  # FP32 weights are their own master weights
                yield Owned(p.places, 0, p.numel(), master, rule[id(master)])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own memory of a tensor, flat, a view."""
    return getattr(tensor, "_local_tensor", tensor).detach().view(-1)


def tensors(chunks, optimizer, cfg) -> dict[str, Pieces]:
    """Master weights and moments of this rank, by layout-free name; moments not there yet are made, as zeros."""
    found: dict[str, Pieces] = {}
    for part, place, box, writes in _boxes(chunks, optimizer, cfg):
        held = {MASTER: local(part.master)}
        held |= {name: local(_moment(part, name)) for name in _moments(part, cfg)}
        for name, flat in held.items():
            entry = found.setdefault(f"{name}/{place.key}", Pieces(place.global_shape, []))
            entry.pieces.append(Piece(box.offset, flat[box.first : box.last].view(box.shape), writes))
    for part in owned(chunks, optimizer, cfg.parallel.zero):
        for name, shape, piece in _vectors(part, cfg.parallel.zero):
            found.setdefault(name, Pieces(shape, [])).pieces.append(piece)
    return found


def bytes_to_write(chunks, optimizer, cfg) -> int:
    """About how much this rank writes, before its moments are made: its share of `tensors`, and its generators."""
    kinds, total = 1 + len(MOMENTS[cfg.optimizer.name]), sum(aligned(held) for held in generators().values())
    for part, _, box, writes in _boxes(chunks, optimizer, cfg):
        total += writes * kinds * aligned(local(part.master)[box.first : box.last])
    return total


def aligned(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, rounded up to where the next one may begin."""
    return -(-tensor.nbytes // 64) * 64


def _boxes(chunks, optimizer, cfg) -> Iterator[tuple[Owned, Place, Box, bool]]:
    """Every box of this rank, and whether this rank writes it.

    Without ZeRO all data-parallel ranks own the same boxes: each writes the next one when it has written least so far.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    written = [0] * (1 if cfg.parallel.zero else group.size())
    me = 0 if cfg.parallel.zero else group.rank()
    for part in owned(chunks, optimizer, cfg.parallel.zero):
        for place in part.places:
            for box in boxes(place, part.start, part.end):
                turn = written.index(min(written))
                written[turn] += (box.last - box.first) * place.writes
                yield part, place, box, place.writes and turn == me


def _moments(part: Owned, cfg) -> list[str]:
    names, made = MOMENTS[cfg.optimizer.name], part.rule.state[part.master]
    return [name for name in names if name in made] if cfg.optimizer.name in MADE else list(names)


def _vectors(part: Owned, zero: int) -> Iterator[tuple[str, tuple[int, ...], Piece]]:
    """Moments of a matrix that are one number a row or a column; every rank that owns some of the matrix has them."""
    place, held = part.places[0], part.rule.state[part.master]
    ahead, first = place.prepended, parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    # The owner of the first element writes.
    writes = place.writes and not any(place.offset[ahead:]) and part.start == 0 and (zero > 0 or first)
    for name, axis in getattr(part.rule, "factored", {}).items():
        if name in held:
            shape = place.global_shape[:ahead] + (place.global_shape[ahead + axis],)
            data = held[name].view((1,) * ahead + shape[ahead:])
            yield f"{name}/{place.key}", shape, Piece(place.offset[:ahead] + (0,), data, writes)


def _moment(part: Owned, name: str) -> torch.Tensor:
    state = part.rule.state[part.master]
    if state.get(name) is None:
        state[name] = torch.zeros_like(part.master.detach())
    return state[name]


def updates(chunks, optimizer, zero: int) -> int:
    """How many updates the optimizer has made; steps that the loss scaler skipped are none."""
    counts = [0]
    for part in owned(chunks, optimizer, zero):
        counts.append(int(part.rule.state[part.master].get("step", 0)))
        counts += [int(group.get("step", 0)) for group in part.rule.param_groups]
    most = torch.tensor([max(counts)], dtype=torch.long, device="cuda")
    dist.all_reduce(most, dist.ReduceOp.MAX)  # a rank may own nothing
    return int(most)


# Rules of PyTorch's that count the updates of each parameter in a tensor of its own.
COUNTING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


def set_updates(chunks, optimizer, cfg, count: int) -> None:
    """Tell a rule that counts how many updates its moments have seen: a tensor a parameter, or a number a group."""
    if cfg.optimizer.name in (OptimizerName.sgd, OptimizerName.momentum, OptimizerName.lion):
        return
    for part in owned(chunks, optimizer, cfg.parallel.zero):
        if isinstance(part.rule, COUNTING):
            group = part.rule.param_groups[0]
            on_device = group.get("capturable") or group.get("fused")
            device = local(part.master).device if on_device else "cpu"
            # One tensor for each: a shared one would count once for every parameter.
            part.rule.state[part.master]["step"] = torch.tensor(float(count), dtype=torch.float32, device=device)
        else:
            for group in part.rule.param_groups:
                group["step"] = count


def install_masters(chunks, optimizer, zero: int) -> None:
    """Round the master weights into the weights that are computed with, and hand them to all ranks that need them."""
    if zero >= 2:
        for chunk in chunks:
            chunk.module.install_optimized_model_weights()
        return
    for part in optimizers(optimizer):
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    if zero == 1:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def loss_scale(optimizer) -> dict | None:
    """State of the dynamic loss scaler; None when there is none."""
    for part in optimizers(optimizer):
        scaler = getattr(part, "grad_scaler", None)
        if hasattr(scaler, "_growth_tracker"):
            scale = scaler.scale.item()
            return dict(scale=scale, growth=scaler._growth_tracker, hysteresis=scaler._hysteresis_tracker)
    return None


def set_loss_scale(optimizer, state: dict) -> None:
    """Put the dynamic loss scaler, where there is one, into a state that `loss_scale` told."""
    for part in optimizers(optimizer):
        scaler = getattr(part, "grad_scaler", None)
        if hasattr(scaler, "_growth_tracker"):
            scaler._scale.fill_(state["scale"])
            scaler._growth_tracker, scaler._hysteresis_tracker = state["growth"], state["hysteresis"]


def generators() -> dict[str, torch.Tensor]:
    """States of this rank's random generators, which dropout draws from; they belong to one layout."""
    found = {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}
    return found | {f"tracker/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}


def set_generators(states: dict[str, torch.Tensor]) -> None:
    """Restore what `generators` told."""
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state(states["device"])
    tracked = {name.removeprefix("tracker/"): s for name, s in states.items() if name.startswith("tracker/")}
    get_cuda_rng_tracker().set_states(tracked)
