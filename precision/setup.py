"""What the chosen precision needs from PyTorch before the model is built."""

import torch

from conf.schema import Compute, Config


def apply(cfg: Config) -> None:
    """Set PyTorch's matrix-product precision, and FP16 products on a CPU."""
    tf32 = cfg.precision.compute is Compute.tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if cfg.precision.compute is Compute.fp16 and not torch.cuda.is_available():
        from precision import fp16_on_cpu

        fp16_on_cpu.install()


def notes(cfg: Config) -> dict[str, str]:
    """What a reader has to know about this precision on this machine, as rows for the block before the first step."""
    if torch.cuda.is_available():
        return {}
    if cfg.precision.compute is Compute.tf32:
        return {"precision": "TF32 needs a GPU: on this CPU its products are computed in FP32"}
    if cfg.precision.compute is Compute.fp16:
        return {"precision": "FP16 products are computed in FP32 from FP16 inputs and rounded, as a tensor core does"}
    return {}
