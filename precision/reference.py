"""One transformer layer in FP32, into which the weights of any other can be put, to compute what that one should have.

It is built of Megatron's plain modules whatever the model is built of, so that nothing of the precision under test (FP8
products, Transformer Engine) is in it.
"""

from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import build_module

from conf.schema import Compute, Config, Format, Fp8, Recompute
from models import gpt


class Reference:
    """Compares a layer's output with an FP32 recomputation from the same inputs and the same weights."""

    def __init__(self, cfg: Config):
        self.cfg = replace(
            cfg,
            precision=replace(cfg.precision, params=Format.fp32, compute=Compute.fp32, fp8=Fp8.none),
            parallel=replace(cfg.parallel, recompute=Recompute.none),
        )
        self.layer = None

    @torch.no_grad()
    def compare(self, layer, args, kwargs, output) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared error and squared size of the output, of the micro-batch's first sequence; to be added over ranks.

        Args:
            args, kwargs: what `layer` was called with.
            output: what came out, `[seq, batch, hidden]`.

        Tensor-parallel ranks hold the same output unless they share out the sequence: then all but the first tell 0.
        """
        if self.layer is None:
            config = gpt.transformer_config(self.cfg)
            self.layer = build_module(gpt.layer_spec(self.cfg, 0), config=config, layer_number=1).eval()
        weights = dict(layer.named_parameters())
        for name, parameter in self.layer.named_parameters():
            parameter.copy_(weights[name])
        tf32 = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        args = [_first(args[0]), *map(_fp32, args[1:])] if args else []
        kwargs = {name: _first(value) if name == "hidden_states" else _fp32(value) for name, value in kwargs.items()}
        exact = self.layer(*args, **kwargs)[0]
        torch.set_float32_matmul_precision(tf32)
        counts = self.cfg.parallel.sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0
        difference = _first(output) - exact
        return difference.square().sum() * counts, exact.square().sum() * counts


def _first(hidden: torch.Tensor) -> torch.Tensor:
    return _fp32(hidden[:, :1])


def _fp32(value):
    is_number = torch.is_tensor(value) and value.is_floating_point()
    return value.detach().float() if is_number else value
