"""What the chosen precision needs from PyTorch before the model is built."""

import torch

from conf.schema import Compute, Config, Fp8
from parallel.devices import FP8_FROM
from precision import table


def apply(cfg: Config) -> None:
    """Set PyTorch's matrix-product precision, and FP16 products on a CPU.

    Raises:
        RuntimeError: if FP8 is to be computed by Transformer Engine and this rank cannot.
    """
    tf32 = cfg.precision.compute is Compute.tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if cfg.precision.compute is Compute.fp16 and not torch.cuda.is_available():
        from precision import fp16_on_cpu

        fp16_on_cpu.install()
    if cfg.precision.fp8 is Fp8.transformer_engine:
        _need_transformer_engine()


def _need_transformer_engine() -> None:
    """Look again on the rank: its node may be another than the one where the run was typed."""
    major, minor = torch.cuda.get_device_capability()
    if major + minor / 10 < FP8_FROM:
        raise RuntimeError(
            f"{torch.cuda.get_device_name()} has no FP8 products: take precision.fp8=emulated or precision=bf16."
        )
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"precision=fp8 needs transformer-engine, which cannot be imported here ({error}): "
            "pip install 'transformer-engine[pytorch]', or take precision.fp8=emulated."
        ) from error


def notes(cfg: Config) -> dict[str, str]:
    """What a reader has to know about this precision on this machine, as rows for the block before the first step."""
    said = {"numbers": table.text(cfg)}
    if torch.cuda.is_available():
        return said
    if cfg.precision.compute is Compute.tf32:
        said["precision"] = "TF32 needs a GPU: on this CPU its products are computed in FP32"
    if cfg.precision.compute is Compute.fp16:
        said["precision"] = "FP16 products are computed in FP32 from FP16 inputs and rounded, as a tensor core does"
    return said
