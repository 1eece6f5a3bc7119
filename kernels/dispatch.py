"""Which implementation runs: decided here, once, and logged once. Never by environment variable."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

Backend = Literal["auto", "reference", "chunked", "triton"]

logger = logging.getLogger("kernels")

NOT_SEEN_ON_A_GPU: frozenset[str] = frozenset()
"""Right in Triton's interpreter, compiled for sm_90, never run on a GPU: "auto" leaves them out
until `pytest -m gpu tests/kernels` has passed on one and their names are taken off this list."""

_as_on_gpu: ContextVar[Literal["no", "seen", "all"]] = ContextVar("as_on_gpu", default="no")


def choose_backend(
    requested: Backend, device: torch.device, operator: str, triton_obstacle: str | None
) -> Backend:
    """The backend that runs `operator` on tensors of `device`.

    "auto" is "triton" on a CUDA device unless there is a `triton_obstacle` or the kernels have not
    been seen on one, else "chunked".
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
    compiling = torch.compiler.is_compiling()
    pretended = "no" if compiling else _as_on_gpu.get()
    seen = pretended == "all" or operator not in NOT_SEEN_ON_A_GPU
    if pretended != "no" and triton_obstacle is None and seen:
        return "triton"
    obstacle = triton_obstacle is not None or not seen
    backend: Backend = "chunked" if device.type != "cuda" or obstacle else "triton"
    if not compiling:
        log_choice(operator, device.type, f"backend {backend}")
    return backend


@contextmanager
def as_on_gpu(kernels: Literal["seen", "all"] = "seen") -> Iterator[None]:
    """Inside, "auto" is what it would be on a CUDA device, for fake tensors of whatever device:
    PyTorch has none of a device that is not there.

    Args:
        kernels: those that have been seen on a GPU, or all that there are.
    """
    token = _as_on_gpu.set(kernels)
    try:
        yield
    finally:
        _as_on_gpu.reset(token)


def is_fake(x: Tensor) -> bool:
    """Whether x has a shape and no numbers, and no address."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def is_traced(x: Tensor) -> bool:
    """Whether x is fake or something watches operations (selective activation checkpointing does):
    then only a custom operator will do."""
    return is_fake(x) or _get_current_dispatch_mode() is not None


@torch.compiler.assume_constant_result
def triton_interprets() -> bool:
    """Whether Triton runs its kernels on the CPU, in Python (TRITON_INTERPRET=1 at its import)."""
    try:
        from triton import knobs
    except ImportError:  # no Triton for this platform
        return False
    return bool(knobs.runtime.interpret)


@lru_cache
def log_choice(operator: str, device_type: str, choice: str) -> None:
    """Says once what was chosen for an operator."""
    logger.info("%s on %s: %s", operator, device_type, choice)
