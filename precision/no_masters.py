"""BF16 weights without FP32 master weights, in Megatron's wrapping.

The optimizer's parameters are then the model's own weights (its shard of them under ZeRO), and each gradient has their
format. Megatron goes this way only with Transformer Engine's Adam (`use_precision_aware_optimizer`); what the way
takes is the flag set below and gradients at two places, so any rule can go it. The step itself is computed in FP32 and
rounded into the weight once (optim/moments.py): what is lost is lost by the format, not by the arithmetic.
"""

from functools import partial

from megatron.core.optimizer import OptimizerConfig

from conf.schema import Config, Format
from parallel.checkpoint_state import optimizers


def chosen(cfg: Config) -> bool:
    """Whether the configuration keeps no master weights."""
    return cfg.precision.params is Format.bf16 and cfg.precision.main_params is Format.bf16


def allow(config: OptimizerConfig) -> None:
    """Make no master weights; read gradients that may be BF16, from `decoupled_grad`."""
    if not config.use_distributed_optimizer:
        config.bf16 = False  # the wrapping for FP32 takes the weights as they are, whatever their format
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def hand_over_gradients(wrapped) -> None:
    """Have every gradient where Megatron's norm and clipping look and where a torch optimizer does."""
    for part in optimizers(wrapped):
        part.prepare_grads = partial(_prepare, part, part.prepare_grads)
        part.get_grads_for_grad_norm = partial(_in_fp32, part.get_grads_for_grad_norm)


def _prepare(part, prepare) -> bool:
    for p in part.get_parameters():
        p.decoupled_grad = None
    overflow = prepare()
    for p in part.get_parameters():
        if p.decoupled_grad is not None:
            p.grad = p.decoupled_grad
        else:
            p.decoupled_grad = p.grad
    return overflow


def _in_fp32(grads, *args, **kwargs):
    """Their norm would have three digits otherwise."""
    return [grad.float() for grad in grads(*args, **kwargs)]
