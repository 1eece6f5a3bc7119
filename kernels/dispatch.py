"""Which implementation runs: decided here, once, and logged once. Never by environment variable."""

import logging
from functools import lru_cache
from typing import Literal, get_args

import torch

Backend = Literal["auto", "reference", "chunked", "triton"]

logger = logging.getLogger("kernels")


def choose_backend(requested: Backend, device: torch.device, operator: str) -> Backend:
    """The backend that runs `operator` on tensors of `device`.

    "auto" is "chunked" until an operator has Triton kernels. ValueError for an unknown name and
    for "triton" where it cannot run.
    """
    if requested not in get_args(Backend):
        raise ValueError(
            f"unknown backend: got {requested!r}; expected one of {', '.join(get_args(Backend))}"
        )
    if requested == "triton" and device.type != "cuda":
        raise ValueError(
            f'backend="triton" needs a CUDA device: tensors are on {device.type}; '
            'use backend="chunked"'
        )
    if requested == "triton":
        raise ValueError(f'{operator} has no Triton kernels yet; use backend="chunked"')
    if requested != "auto":
        return requested
    _log_choice(operator, device.type, "chunked")
    return "chunked"


@lru_cache
def _log_choice(operator: str, device_type: str, backend: str) -> None:
    logger.info("%s on %s: backend %s", operator, device_type, backend)
