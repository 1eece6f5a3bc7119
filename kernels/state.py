"""The memory of a log-linear operator between two calls: a state for every level."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.levels import num_levels


@dataclass(frozen=True)
class FenwickState:
    """The recurrence's state right after token `position` - 1 was read (no carry done yet).

    levels: [N, H, L, K, V] fp32 (fp64 if the operator ran in fp64), S of every level for every
        batch row or packed document. Its size depends on L alone, whatever was read.
    position: [N] int64, tokens read so far; on the CPU, so that asking which levels are live never
        waits for a device. A position beside `levels` makes a step that asks nothing: it has the
        same kernels whatever was read, so a CUDA graph can hold it; its caller checks the length.
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
        near = (torch.device("cpu"), self.levels.device)
        if tuple(self.position.shape) != (N,) or self.position.device not in near:
            raise ValueError(
                f"state.position has shape {list(self.position.shape)} on "
                f"{self.position.device}; expected [{N}] on the CPU or beside the levels on "
                f"{self.levels.device}"
            )

    @property
    def live_levels(self) -> int:
        """Levels from 0 that the next token can read in some row; those above are zero. L where
        the position is on a device."""
        if self.position.device.type != "cpu":
            return self.levels.shape[2]
        return num_levels(int(self.position.max()) + 1)


@dataclass(frozen=True)
class LazyFenwickState:
    """A state for decoding, changed where it lies: its decay is written beside it.

        S[l] = exp(log_scale[l]) * levels[l]     for the levels that the last token saw

    so that a step reads the live levels once and writes two of them. Levels that are not live hold
    leftovers. All three tensors are on one device and never move, as a CUDA graph needs.

    levels: [N, H, L, K, V] fp32;  log_scale: [N, H, L] fp32;  position: [N] int64.
    """

    levels: Tensor
    log_scale: Tensor
    position: Tensor

    @staticmethod
    def of(state: FenwickState) -> "LazyFenwickState":
        """A copy of `state`."""
        levels = state.levels.float().clone(memory_format=torch.contiguous_format)
        position = state.position.to(levels.device, copy=True)
        return LazyFenwickState(levels, levels.new_zeros(levels.shape[:3]), position)

    def settled(self) -> FenwickState:
        """A copy with the decay carried out and the levels that are not live zero."""
        l = torch.arange(self.levels.shape[2], device=self.levels.device)
        last = self.position[:, None] - 1  # the token that the levels are seen from
        live = torch.where(l == 0, last >= 0, (last.clamp(min=0) >> (l - 1).clamp(min=0)) & 1 == 1)
        live = live[:, None, :, None, None]
        levels = torch.where(live, self.levels * self.log_scale.exp()[..., None, None], 0)
        return FenwickState(levels, self.position.clone())


def live_part(state: FenwickState, level_weights: Tensor) -> tuple[FenwickState, Tensor]:
    """The levels that the next token can read, and their weights [..., L]: a step then costs what
    is there, and its result does not depend on how many levels more the model has."""
    live = state.live_levels
    return FenwickState(state.levels[:, :, :live], state.position), level_weights[..., :live]


def with_live_part(state: FenwickState, live: FenwickState) -> FenwickState:
    """`live` after a step, with the empty levels of `state` above it."""
    if live.levels.shape == state.levels.shape:
        return live
    above = state.levels[:, :, live.levels.shape[2] :]
    return FenwickState(torch.cat([live.levels, above], dim=2), live.position)
