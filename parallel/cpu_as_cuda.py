"""Make CUDA names mean the CPU, so that Megatron-core's own code runs on a machine without a GPU.

Megatron-core names the device outright in some hundred places (`device="cuda"`, `torch.cuda.current_device()`,
`'torch.cuda.FloatTensor'`, streams and events). `install()` wraps PyTorch's factory functions once and replaces the
functions of `torch.cuda` by ones that answer for a single, synchronous device. Wrapping is chosen over a
`TorchFunctionMode` because a mode is not active inside autograd's backward pass and costs 5-8 % on a small model.

`install()` refuses to act where CUDA is available, and acts once.
"""

import contextlib
import functools

import torch
import torch.distributed as dist

FACTORIES = (
    "tensor zeros ones empty full arange linspace eye rand randn randint randperm as_tensor scalar_tensor "
    "empty_strided zeros_like ones_like empty_like full_like rand_like randn_like randint_like"
).split()
NEW = "new_tensor new_zeros new_ones new_empty new_full".split()

_installed = False


def _cpu(device):
    """The device meant by `device`, with every CUDA device meaning the CPU."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return device


def _on_cpu(make):
    """Wrap a function that takes `device=` and perhaps `pin_memory=`; pinning has no meaning without a GPU."""

    @functools.wraps(make)
    def wrapped(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return wrapped


def _to_cpu(to):
    """Wrap `Tensor.to` or `Module.to`, whose first positional argument may be a device."""

    @functools.wraps(to)
    def wrapped(self, *args, **kwargs):
        if args and isinstance(args[0], (torch.device, str, int)):
            args = (_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    return wrapped


def _cuda_type_name(type_):
    """Wrap `Tensor.type`: without an argument it names the tensor type, and callers compare that with CUDA's name."""

    @functools.wraps(type_)
    def wrapped(self, dtype=None, non_blocking=False, **kwargs):
        if dtype is None:
            return type_(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return type_(self, dtype, non_blocking, **kwargs)

    return wrapped


class Stream:
    """A stream on which everything is done when it is called for."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        """Nothing to wait for."""

    def wait_event(self, event):
        """Nothing to wait for."""

    def synchronize(self):
        """Nothing to wait for."""

    def record_event(self, event=None):
        """An event that has happened."""
        return event or Event()

    def query(self):
        """Always done."""
        return True


class Event:
    """An event that has happened."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        """Nothing to record."""

    def wait(self, stream=None):
        """Nothing to wait for."""

    def synchronize(self):
        """Nothing to wait for."""

    def query(self):
        """Always done."""
        return True

    def elapsed_time(self, end):
        """No time passes between two events of a synchronous device; time the host instead."""
        return 0.0


def _all_gather_into_tensor(all_gather_into_tensor):
    """Gather into equal chunks of the output instead of into the output as a whole, on gloo only.

    With gloo's own version, runs under Megatron-FSDP die of a corrupted heap after tens to hundreds of steps
    ("unaligned tcache chunk" in gloo's run loop under the coalesced all-gather); with this one they do not.
    """

    @functools.wraps(all_gather_into_tensor)
    def wrapped(output_tensor, input_tensor, group=None, async_op=False):
        if dist.get_backend(group) != "gloo":
            return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        chunks = list(output_tensor.view(-1).chunk(dist.get_world_size(group)))
        work = dist.all_gather(chunks, input_tensor.reshape(-1), group, async_op=True)
        # Wait even when asked not to: Megatron-FSDP gathers inside a coalescing manager, which waits only for the
        # collectives that it knows how to merge, and would free the buffers under this one.
        work.wait()
        return work if async_op else None

    return wrapped


def install() -> None:
    """Make CUDA names mean the CPU in this process, for good.

    Raises:
        RuntimeError: if CUDA is available, because then the names mean something already.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("The CPU stand-in was asked for although CUDA is available.")
    _installed = True

    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in NEW:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    torch.Tensor.to = _to_cpu(torch.Tensor.to)
    torch.nn.Module.to = _to_cpu(torch.nn.Module.to)
    torch.Tensor.type = _cuda_type_name(torch.Tensor.type)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.pin_memory = lambda self, *args: self

    _replace_torch_cuda()
    _replace_device_mesh()
    dist.all_gather_into_tensor = _all_gather_into_tensor(dist.all_gather_into_tensor)
    _replace_megatron_rng()


def _replace_torch_cuda() -> None:
    stream = Stream()
    # torch.compile keeps a table of PyTorch's function objects, so no two names may share one.
    for name in "set_device synchronize empty_cache reset_peak_memory_stats set_stream".split():
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in "memory_allocated max_memory_allocated memory_reserved".split():
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)
    for name in "range_push range_pop".split():
        setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: None)
    answers = dict(
        current_device=lambda: 0,
        device_count=lambda: 1,
        memory_stats=lambda *args: {},
        # Not torch.manual_seed, which calls these two.
        manual_seed=lambda seed: torch.default_generator.manual_seed(seed),
        manual_seed_all=lambda seed: torch.default_generator.manual_seed(seed),
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        stream=lambda stream: contextlib.nullcontext(stream),
        is_current_stream_capturing=lambda: False,
        get_device_capability=lambda *args: (0, 0),
        Stream=Stream,
        Event=Event,
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, answers[name])


def _replace_device_mesh() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    init, from_group = DeviceMesh.__init__, DeviceMesh.from_group

    @functools.wraps(init)
    def cpu_init(self, device_type, *args, **kwargs):
        init(self, _cpu(device_type), *args, **kwargs)

    def cpu_from_group(group, device_type, *args, **kwargs):
        return from_group(group, _cpu(device_type), *args, **kwargs)

    DeviceMesh.__init__ = cpu_init
    DeviceMesh.from_group = staticmethod(cpu_from_group)


def _replace_megatron_rng() -> None:
    """Megatron sets the CUDA generator through private PyTorch calls, which would silently do nothing here."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import utils as fsdp
    from megatron.core.tensor_parallel import random as tensor_parallel

    for module in (tensor_parallel, fsdp):
        module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
        module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
