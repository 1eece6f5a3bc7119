"""Memory that shows what a kernel reads unwritten, and whether it writes outside its buffers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

GUARD = 4096
GUARD_VALUE = 7.0


@contextmanager
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Inside, torch.empty and torch.empty_like give buffers of NaN between guard words; yields a
    list of all, guard words included. Fails at the end where a guard word has changed."""
    guarded: list[Tensor] = []

    def allocate(*sizes, device=None, dtype=torch.float32):
        count = torch.Size(sizes).numel()
        buffer = torch.full((count + 2 * GUARD,), torch.nan, dtype=dtype, device=device)
        buffer[:GUARD] = buffer[-GUARD:] = GUARD_VALUE
        guarded.append(buffer)
        return buffer[GUARD : GUARD + count].view(sizes)

    def like(x, dtype=None):
        return allocate(*x.shape, dtype=dtype or x.dtype, device=x.device)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", allocate)
        patch.setattr(torch, "empty_like", like)
        yield guarded
    for buffer in guarded:
        assert (buffer[:GUARD] == GUARD_VALUE).all()
        assert (buffer[-GUARD:] == GUARD_VALUE).all()
