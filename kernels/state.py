"""The memory of a log-linear operator between two calls: a state for every level."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FenwickState:
    """The recurrence's state right after token `position` - 1 was read (no carry done yet).

    levels: [N, H, L, K, V] fp32 (fp64 if the operator ran in fp64), S of every level for every
        batch row or packed document. Its size depends on L alone, whatever was read.
    position: [N] int64 on the CPU, tokens read so far; on the host, so that asking which levels
        are live never waits for a device.
    """

    levels: Tensor
    position: Tensor

    @staticmethod
    def empty(
        N: int,
        H: int,
        L: int,
        K: int,
        V: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "FenwickState":
        """The state before any token: all levels zero, position 0."""
        levels = torch.zeros(N, H, L, K, V, device=device, dtype=dtype)
        return FenwickState(levels, torch.zeros(N, dtype=torch.int64))

    def check(self, N: int, H: int, L: int, K: int, V: int) -> None:
        """ValueError unless the state has these sizes."""
        expected = (N, H, L, K, V)
        if tuple(self.levels.shape) != expected:
            raise ValueError(
                f"state.levels has shape {list(self.levels.shape)}; "
                f"expected [N, H, L, K, V] = {list(expected)}"
            )
        if tuple(self.position.shape) != (N,) or self.position.device.type != "cpu":
            raise ValueError(
                f"state.position has shape {list(self.position.shape)} on "
                f"{self.position.device}; expected [{N}] on the CPU"
            )
