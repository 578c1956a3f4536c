"""Keep Megatron-core's start-up remarks off the console: missing optional packages and its own deprecations."""

import logging
import warnings


def megatron() -> None:
    """Call before the first import of Megatron-core. Errors still come through."""
    for about in (
        "Transformer Engine and Apex",
        "Apex is not installed",
        "absl.logging",
        "multi_tensor_scale_tensor",
        "transformer_engine",
    ):
        warnings.filterwarnings("ignore", message=f".*{about}.*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
