"""flash-linear-attention, an optional library: is it there, and how it is imported."""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@lru_cache
def fla_is_there() -> bool:
    """Whether `import fla` would find it."""
    return find_spec("fla") is not None


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
