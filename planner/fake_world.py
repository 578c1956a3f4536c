"""One rank of a world that does not exist: a process group that sends nothing, tensors that hold nothing."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import GroupMember
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from parallel import cpu_as_cuda, groups
from parallel.resolve import world_size


@contextlib.contextmanager
def rank_of(cfg, rank: int) -> Iterator[None]:
    """This process as rank `rank` of the world that `cfg` describes, with Megatron's grid; nothing outlives it."""
    cpu_as_cuda.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size(cfg))
    new_group, all_gather_object = dist.new_group, dist.all_gather_object

    def of_one_mind(objects, own, group=None):
        # Megatron asks which kinds of parameter groups exist; every stage has the same ones.
        objects[:] = [own] * len(objects)

    def own_groups_only(ranks=None, *args, **kwargs):
        # A world of thousands of ranks has thousands of groups, of which a rank is in a handful.
        if ranks is not None and rank not in ranks:
            return GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, *args, **kwargs)

    dist.new_group, dist.all_gather_object = own_groups_only, of_one_mind
    try:
        groups.grid(cfg)
        yield
    finally:
        dist.new_group, dist.all_gather_object = new_group, all_gather_object
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def axes() -> dict[frozenset, str]:
    """The axis of each group this rank is in, by the group's ranks; `all` is a group over several axes."""
    found = {frozenset(range(dist.get_world_size())): "all"} if dist.get_world_size() > 1 else {}
    ps = parallel_state
    for axis, group in (
        ("all", ps.get_model_parallel_group()),
        ("embedding", ps.get_embedding_group(check_initialized=False)),
        ("dp", ps.get_data_parallel_group(with_context_parallel=True)),
        ("dp", ps.get_data_parallel_group()),
        ("cp", ps.get_context_parallel_group()),
        ("pp", ps.get_pipeline_model_parallel_group()),
        ("tp", ps.get_tensor_model_parallel_group()),
    ):
        if group is not None and group != GroupMember.NON_GROUP_MEMBER and group.size() > 1:
            found[frozenset(dist.get_process_group_ranks(group))] = axis
    return found


def axis_of() -> callable:
    """A function from a process group to its axis, None for a group of one; made in this world."""
    table = axes()
    known: dict[str, str | None] = {}

    def axis(group) -> str | None:
        if group.group_name not in known:
            other = "other" if group.size() > 1 else None
            known[group.group_name] = table.get(frozenset(dist.get_process_group_ranks(group)), other)
        return known[group.group_name]

    return axis


@contextlib.contextmanager
def without_values() -> Iterator[FakeTensorMode]:
    """Tensors have shapes and storages but no values; what only concerns values is left out."""
    from models import init, loss
    from parallel.zero import StageFSDP

    def with_values(self, groups, index=StageFSDP._init_dist_index):
        with _disable_current_modes():
            return index(self, groups)

    replaced = [
        # It keeps a tensor for the life of the process.
        (loss, "_positions", loss._positions.__wrapped__),
        (init, "initialize", lambda chunk, model, seed: None),
        # The ranks of a device mesh are kept in a tensor that is read.
        (StageFSDP, "_init_dist_index", with_values),
        (torch.nn.Module, "to", lambda module, device: module),  # there is one device
        (torch.nn.Module, "bfloat16", lambda module: _converted(module, torch.bfloat16)),
        (torch.nn.Module, "half", lambda module: _converted(module, torch.float16)),
        # Numbers read off tensors one by one (the norms of all gradients) would need values.
        (torch, "tensor", lambda data, *args, make=torch.tensor, **kwargs: make(_numbers(data), *args, **kwargs)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _numbers(data):
    """`data` with 1.0 in place of tensors."""
    if isinstance(data, (list, tuple)):
        return [_numbers(part) for part in data]
    return 1.0 if isinstance(data, torch.Tensor) else data


def _converted(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """What PyTorch cannot do to fake parameters: put them into another format, with what is noted on them."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dtype is not dtype:
                new = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                new.__dict__.update(parameter.__dict__)
                setattr(part, name, new)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))
    return module


def coordinates(cfg, pp: int) -> int:
    """The first rank of pipeline stage `pp`: Megatron numbers ranks tp fastest, then cp, dp and pp."""
    p = cfg.parallel
    return pp * p.tp * p.cp * p.dp
