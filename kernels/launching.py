"""How every Triton kernel of the operators gets its memory and is started."""

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from kernels.dispatch import is_fake


def launch_variant(
    compiled: dict[tuple[Any, ...], Any],
    options: dict[str, int],
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """kernel[grid](*args, **constants, **options); later calls take the variant compiled then.

    Triton decides at every call which compiled variant fits its arguments, and asks for hooks and
    metadata; that costs more than a small kernel runs. Here the owner of `compiled` fixes sizes,
    dtypes and the alignment of every buffer, so after the first call the variant is known.
    """
    key = (kernel.__name__, *options.values(), *constants.values())
    variant = compiled.get(key)
    if variant is None:
        compiled[key] = kernel[grid](*args, **constants, **options)
        return
    # As addresses: for a tensor Triton's launcher asks the driver whether the device can reach it,
    # for every argument of every call.
    plain = [x.data_ptr() if type(x) is Tensor else x for x in args]
    if _hooked():
        variant[grid](*plain, *constants.values())
        return
    active = driver.active
    stream = active.get_current_stream(active.get_current_device())
    variant.run(
        *grid, stream, variant.function, variant.packed_metadata, None, None, None,
        *plain, *constants.values(),
    )  # fmt: skip


def _hooked() -> bool:
    """Whether a profiler of Triton's listens to launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def ready(x: Tensor) -> Tensor:
    """x contiguous, on 16 bytes as descriptors and compiled kernels ask (a slice may not be)."""
    x = x.contiguous()
    if is_fake(x):
        return x  # inductor's buffers are aligned, and a tracer has no addresses
    return x if x.data_ptr() % 16 == 0 else x.clone()


def scratch(device: torch.device, *sizes: int) -> tuple[Tensor, ...]:
    """Flat fp32 buffers from one allocation: a dozen of them would cost more than some kernels."""
    return split(torch.empty(split_size(*sizes), device=device, dtype=torch.float32), *sizes)


def split(buffer: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Parts of a buffer of split_size(*sizes) elements, each at least as large as asked for and
    aligned as the kernels were compiled for."""
    return buffer.split_with_sizes([_aligned(size) for size in sizes])


def split_size(*sizes: int) -> int:
    """Elements that `split` needs."""
    return sum(_aligned(size) for size in sizes)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
