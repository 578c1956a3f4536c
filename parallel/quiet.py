"""Keep start-up remarks of libraries off the console: missing optional packages, their own deprecations."""

import logging
import warnings


def libraries() -> None:
    """Call before the first import of Megatron-core. Errors are exceptions and come through."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    # These are attributed to other modules, so by their text.
    for text in (
        ".*is experimental and still under active development",
        "`torch.distributed.*` is deprecated",
        "torch.distributed is disabled, unavailable or uninitialized",  # a checkpoint read by one process
    ):
        warnings.filterwarnings("ignore", message=text)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
