"""The ten rules as torch optimizers, put into Megatron's wrapping for mixed precision and sharding."""

import torch

from conf.schema import Config, Optimizer, OptimizerName
from optim.moments import Kept, keep
from optim.whole import Whole
from optim.whole_rule import WholeRule
from parallel.checkpoint_state import MOMENTS, optimizers


def make(parameters, cfg: Config) -> torch.optim.Optimizer:
    """The rule `cfg.optimizer.name` over some parameters, without state."""
    o: Optimizer = cfg.optimizer
    betas = o.beta1, o.beta2
    match o.name:
        case OptimizerName.sgd:
            return torch.optim.SGD(parameters, lr=o.lr)
        case OptimizerName.momentum:
            return torch.optim.SGD(parameters, lr=o.lr, momentum=o.momentum)
        case OptimizerName.rmsprop:
            return torch.optim.RMSprop(parameters, lr=o.lr, alpha=o.beta2, eps=o.eps)
        case OptimizerName.adagrad:
            return torch.optim.Adagrad(parameters, lr=o.lr, eps=o.eps)
        case OptimizerName.adam:
            return torch.optim.Adam(parameters, lr=o.lr, betas=betas, eps=o.eps)
        case OptimizerName.adamw:
            return torch.optim.AdamW(parameters, lr=o.lr, betas=betas, eps=o.eps)
        case OptimizerName.lion:
            return _lion(parameters, o)
        case OptimizerName.lamb:
            from optim.lamb import Lamb

            return Lamb(parameters, o.lr, betas, o.eps)
        case OptimizerName.adafactor:
            from optim.adafactor import Adafactor

            return Adafactor(parameters, o.lr, o.beta2_decay, o.update_clip, o.scale_floor)
        case OptimizerName.muon:
            from optim.muon import Muon

            return Muon(parameters, o.lr, betas, o.eps, o.momentum, cfg)


def _lion(parameters, o: Optimizer) -> torch.optim.Optimizer:
    from emerging_optimizers.scalar_optimizers import Lion

    class EagerLion(Lion):
        """Without the compilation of its update, which needs a C++ compiler and takes longer than many a run."""

        def step(self, closure=None):
            with torch.compiler.set_stance("force_eager"):
                super().step(closure)

    return EagerLion(parameters, lr=o.lr, betas=(o.beta1, o.beta2))


def install(wrapped, chunks, cfg: Config) -> None:
    """Put the rule into Megatron's wrapping, over the same parameters and the very same groups.

    The groups must stay the objects they are: the wrapping swaps master weights and shards in and out of them. Adam and
    AdamW stay Megatron's own (fused on a GPU) when their moments are where it wants them.
    """
    name, kept = cfg.optimizer.name, Kept(cfg)
    if name in (OptimizerName.adam, OptimizerName.adamw) and not kept.elsewhere:
        return
    whole_rules: list[WholeRule] = []
    for part in optimizers(wrapped):
        groups = part.optimizer.param_groups
        # Made over nothing: a shard is a view of the weights, which torch refuses at this place and only here.
        rule = make([torch.nn.Parameter(torch.empty(0))], cfg)
        for group in groups:
            for key, value in rule.defaults.items():
                group.setdefault(key, value)
        rule.param_groups = groups
        rule.state.clear()
        part.optimizer = rule
        if isinstance(rule, WholeRule):
            whole_rules.append(rule)
        elif kept.elsewhere:
            keep(rule, MOMENTS[name], kept)
        elif name is OptimizerName.adagrad:  # makes its state when it is made itself
            for group in groups:
                for p in group["params"]:
                    rule.state[p] = {"sum": torch.zeros_like(p.detach()), "step": torch.tensor(0.0)}
    if whole_rules:
        whole = Whole(chunks, wrapped, cfg)
        for rule in whole_rules:
            rule.start(whole, kept)
