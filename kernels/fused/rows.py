"""Tensors as rows of numbers side by side, as the fused kernels walk them."""

import torch
from torch import Tensor

PROGRAMS_PER_PROCESSOR = 8
INTERPRETED_PROGRAMS = 3


def rows_of(x: Tensor, inner: int = 1) -> tuple[int, int]:
    """(rows, numbers in a row): the last `inner` dimensions are a row."""
    size = x.shape[-inner:].numel()
    return x.numel() // size, size


def with_rows(x: Tensor, inner: int = 1) -> tuple[Tensor, int]:
    """(x, how far its rows are apart): x where its rows are equally far apart and each lies in one
    piece, as a part of a wider projection does; else a copy."""
    size, expected = x.shape[-inner:].numel(), 1
    for length, stride in zip(
        reversed(x.shape[-inner:]), reversed(x.stride()[-inner:]), strict=True
    ):
        if length > 1 and stride != expected:
            return x.contiguous(), size
        expected *= length
    outer = [(n, s) for n, s in zip(x.shape[:-inner], x.stride()[:-inner], strict=True) if n > 1]
    if not outer:
        return x, size
    apart = expected = outer[-1][1]
    for length, stride in reversed(outer):
        if stride != expected:
            return x.contiguous(), size
        expected *= length
    return x, apart


def programs_for(rows: int, device: torch.device) -> int:
    """Programs that share rows out: enough to fill a GPU, few enough to sum what they leave."""
    if device.type != "cuda":
        return min(rows, INTERPRETED_PROGRAMS)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(rows, PROGRAMS_PER_PROCESSOR * processors)


def warps_for(size: int) -> int:
    """Warps of a program that holds a row of this size: few numbers a thread, for registers."""
    if size <= 1024:
        return 4
    return 8 if size <= 2048 else 16
