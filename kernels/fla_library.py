"""flash-linear-attention, an optional library: is it there, and how it is imported."""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@lru_cache
def fla_is_there() -> bool:
    """Whether `import fla` would find it."""
    return find_spec("fla") is not None


@lru_cache
def fla_obstacle(device: torch.device) -> str | None:
    """Why FLA's gated kernels cannot train on this CUDA device, or None: their backward pass
    refuses Hopper with the versions of Triton that compile it wrongly (FLA's issue 640)."""
    try:
        import triton
    except ImportError:
        return "its kernels need Triton, which is not installed"
    release = tuple(int(x) for x in triton.__version__.split("+")[0].split(".")[:3])
    if (3, 4, 0) <= release < (3, 7, 1) and torch.cuda.get_device_capability(device)[0] == 9:
        return (
            f"its backward pass refuses Triton 3.4.0 to 3.7.0 on Hopper: got {triton.__version__}"
        )
    return None


@lru_cache
def prepare_import() -> None:
    """To be called before `import fla`: version 0.6 spells a name as transformers 5 does."""
    try:
        import transformers.configuration_utils as utils
    except ImportError:
        return  # its own message will say so
    if not hasattr(utils, "PreTrainedConfig"):
        utils.PreTrainedConfig = utils.PretrainedConfig


@lru_cache
def fla_function(module: str, name: str) -> Any:
    """module.name; by name, so that nobody who reads imports takes FLA for a requirement."""
    prepare_import()
    return getattr(import_module(module), name)
