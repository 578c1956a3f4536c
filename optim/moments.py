"""How moments are kept between two steps: in FP32 or BF16, on the device or in host memory.

Every rule computes in FP32 on the device. Moments in another format or place are brought there parameter by parameter,
so that no more than one parameter's are there at a time, and rounded or taken back afterwards. (Megatron's own ways,
`use_precision_aware_optimizer` and HybridDeviceOptimizer, are for Adam alone, and not under Megatron-FSDP.)
"""

import torch

from conf.schema import Config, Format, Offload
from parallel.checkpoint_state import local
from precision import no_masters


class Kept:
    """The format and the place of moments; FP32 on the device costs nothing."""

    def __init__(self, cfg: Config):
        self.dtype = torch.bfloat16 if cfg.optimizer.moments is Format.bf16 else torch.float32
        self.offload = cfg.parallel.offload is Offload.optimizer
        self.rounds = no_masters.chosen(cfg)

    @property
    def elsewhere(self) -> bool:
        """Whether anything has to be fetched at all."""
        return self.offload or self.rounds or self.dtype is not torch.float32

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """A moment of the shape of `like`."""
        if not self.offload:
            return torch.zeros(like.shape, dtype=self.dtype, device=like.device)
        return torch.zeros(like.shape, dtype=self.dtype, device="cpu", pin_memory=True)

    def fetch(self, kept: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The moment in FP32 on the device of `like`: itself where it is that already."""
        return kept.to(like.device, torch.float32, non_blocking=True)

    def store(self, kept: torch.Tensor, moment: torch.Tensor) -> None:
        """Round the moment that `fetch` gave into the place where it is kept."""
        if moment is not kept:
            kept.copy_(moment)


def keep(rule: torch.optim.Optimizer, names: tuple[str, ...], kept: Kept) -> None:
    """Let a rule of PyTorch's step with moments that are kept elsewhere, one parameter at a time.

    It is handed a plain FP32 view of the parameter's memory on this rank, whatever Megatron wraps around it; without
    master weights, a copy in FP32 that is rounded back.
    """
    step = rule.step
    for group in rule.param_groups:
        for p in group["params"]:
            weights = local(p)
            rule.state[p] = {name: kept.zeros(weights) for name in names} | {"step": torch.tensor(0.0)}

    def stepped(closure=None):
        wanted = [(group, group["params"]) for group in rule.param_groups]
        try:
            for group, _ in wanted:
                group["params"] = []
            for group, parameters in wanted:
                for p in parameters:
                    if p.grad is not None and local(p).numel():
                        _step_one(rule, step, group, p, names, kept)
                group["params"] = []
        finally:
            for group, parameters in wanted:
                group["params"] = parameters

    rule.step = stepped


def _step_one(rule, step, group, p, names, kept: Kept) -> None:
    weights, held = torch.nn.Parameter(local(p).float(), requires_grad=False), rule.state[p]
    weights.grad = local(p.grad).float()
    moments = {name: kept.fetch(held[name], weights) for name in names}
    group["params"], rule.state[weights] = [weights], held | moments
    step()
    held["step"] = rule.state.pop(weights)["step"]
    for name, moment in moments.items():
        kept.store(held[name], moment)
    if kept.rounds:
        local(p).copy_(weights)
