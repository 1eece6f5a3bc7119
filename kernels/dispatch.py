"""Which implementation runs: decided here, once, and logged once. Never by environment variable."""

import logging
from functools import lru_cache
from typing import Literal, get_args

import torch

Backend = Literal["auto", "reference", "chunked", "triton"]

logger = logging.getLogger("kernels")


def choose_backend(
    requested: Backend, device: torch.device, operator: str, triton_obstacle: str | None
) -> Backend:
    """The backend that runs `operator` on tensors of `device`.

    "auto" is "triton" on a CUDA device unless there is a `triton_obstacle`, else "chunked".
    ValueError for an unknown name and for "triton" where it cannot run.
    """
    if requested not in get_args(Backend):
        raise ValueError(
            f"unknown backend: got {requested!r}; expected one of {', '.join(get_args(Backend))}"
        )
    if requested == "triton":
        if device.type != "cuda" and not triton_interprets():
            raise ValueError(
                f'backend="triton" needs a CUDA device: tensors are on {device.type}; '
                'use backend="chunked"'
            )
        if triton_obstacle is not None:
            raise ValueError(f'{operator}: {triton_obstacle}; use backend="chunked"')
    if requested != "auto":
        return requested
    backend: Backend = "chunked" if device.type != "cuda" or triton_obstacle else "triton"
    if not torch.compiler.is_compiling():
        _log_choice(operator, device.type, backend)
    return backend


@torch.compiler.assume_constant_result
def triton_interprets() -> bool:
    """Whether Triton runs its kernels on the CPU, in Python (TRITON_INTERPRET=1 at its import)."""
    try:
        from triton import knobs
    except ImportError:  # no Triton for this platform
        return False
    return bool(knobs.runtime.interpret)


@lru_cache
def _log_choice(operator: str, device_type: str, backend: str) -> None:
    logger.info("%s on %s: backend %s", operator, device_type, backend)
