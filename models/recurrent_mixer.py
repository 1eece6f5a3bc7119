"""What the Mamba-2 and Gated DeltaNet families share: convolution, lambda, memory between calls.

    x, gates = project(u);   x = silu(conv(x));   o = operator(operands(x, gates), lambda)
    y = output(o, x, gates)

A log-linear mixer reads every level of the Fenwick tree with its own weight
(models/level_weights.py). Its linear parent reads the plain sum of the levels: the same operator
with all weights 1, or a faster one of another library (kernels/linear_parents.py). Between calls
its memory is that sum, [B, H, K, V], of the same size whatever was read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.levels import num_levels
from kernels.state import FenwickState, LazyFenwickState
from models.config import ModelConfig
from models.layers import ShortConvolution
from models.level_weights import LevelProjection, LevelWeights


@dataclass(frozen=True)
class RecurrentState:
    """What one mixer remembers of each row.

    conv: [B, channels, W-1], the last inputs of the convolution.
    memory: all levels, or the linear parent's one matrix, [B, H, K, V] fp32. A LazyFenwickState,
        in a captured step only (models/decode_graph.py), is changed where it lies.
    """

    conv: Tensor
    memory: FenwickState | LazyFenwickState | Tensor


class RecurrentMixer(nn.Module):
    """One mixer, [B, T, D] -> [B, T, D]. Subclasses give the operator and the parts around it."""

    operator: Callable[..., tuple[Tensor, FenwickState | None]]
    linear_operator: Callable[..., Tensor]
    operator_step: Callable[..., tuple[Tensor, FenwickState]]
    operator_step_in_place: Callable[..., Tensor]
    linear_step: Callable[..., tuple[Tensor, Tensor]]

    def __init__(
        self,
        config: ModelConfig,
        sizes: tuple[int, int, int],
        conv: ShortConvolution,
        log_linear: bool,
    ) -> None:
        """sizes: (H, K, V)."""
        super().__init__()
        self.H, self.K, self.V = sizes
        self.L = config.num_levels
        self.conv = conv
        self.level_proj: LevelProjection | None = None
        self.level_weights: LevelWeights | None = None
        if log_linear:
            self.level_weights = LevelWeights(config.level_weights, self.H, self.L)
            if self.level_weights.reads_input:
                self.level_proj = LevelProjection(config, self.H)

    def steps_in_place(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether `step` takes a LazyFenwickState of tensors like these."""
        return False

    def project(self, u: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """u [..., D] -> (the convolution's input [..., channels], what does not pass it)."""
        raise NotImplementedError

    def operands(self, x: Tensor, gates: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The operator's arguments before level_weights: q, k, v, log_decay, ..."""
        raise NotImplementedError

    def output(self, o: Tensor, x: Tensor, gates: tuple[Tensor, ...]) -> Tensor:
        """o [..., H, V] -> [..., D]."""
        raise NotImplementedError

    def empty_state(self, batch_size: int) -> RecurrentState:
        """The state before the first token."""
        conv = self.conv.empty_state(batch_size)
        if self.level_weights is None:
            return RecurrentState(conv, conv.new_zeros(batch_size, self.H, self.K, self.V))
        sizes = (batch_size, self.H, self.L, self.K, self.V)
        dtype = torch.promote_types(conv.dtype, torch.float32)
        memory = FenwickState.empty(*sizes, device=conv.device, dtype=dtype)
        return RecurrentState(conv, memory)

    def forward(self, u: Tensor, cu_seqlens: Tensor | None, longest: int) -> Tensor:
        """Whole documents.

        Args:
            u: [B, T, D]; with cu_seqlens [N+1], B = 1 and the row holds N documents.
            longest: tokens of the longest document; softmax attention asks for it.
        """
        x, gates = self.project(u)
        x, _ = self.conv(x, cu_seqlens)
        inputs = self.operands(x, gates)
        if self.level_weights is None:
            o = self.linear_operator(*inputs, cu_seqlens=cu_seqlens)
        else:
            weights = self._weights(self.level_weights, u)
            o, _ = self.operator(*inputs, weights, cu_seqlens=cu_seqlens)
        return self.output(o, x, gates)

    def prefill(self, u: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """T >= 1 tokens [B, T, D] that follow `state`."""
        x, gates = self.project(u)
        x, conv = self.conv(x, state=state.conv)
        inputs = self.operands(x, gates)
        if self.level_weights is None:
            assert isinstance(state.memory, Tensor)
            past, weights = _as_levels(state.memory, inputs[3])
        else:
            assert isinstance(state.memory, FenwickState)
            past, weights = state.memory, self._weights(self.level_weights, u)
        o, present = self.operator(*inputs, weights, initial_state=past, return_final_state=True)
        assert present is not None
        memory = present.levels.sum(2) if self.level_weights is None else present
        return self.output(o, x, gates), RecurrentState(conv, memory)

    def step(self, u: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """One token [B, D] that follows `state`; O(log T) work."""
        x, gates = self.project(u)
        x, conv = self.conv.step(x, state.conv)
        inputs = self.operands(x, gates)
        memory: FenwickState | LazyFenwickState | Tensor
        if self.level_weights is None:
            o, memory = self.linear_step(*inputs, state.memory)
        elif isinstance(state.memory, LazyFenwickState):
            weights, memory = self._weights(self.level_weights, u), state.memory
            o = self.operator_step_in_place(*inputs, weights, memory)
        else:
            weights = self._weights(self.level_weights, u)
            o, memory = self.operator_step(*inputs, weights, state.memory)
        return self.output(o, x, gates), RecurrentState(conv, memory)

    def _weights(self, level_weights: LevelWeights, u: Tensor) -> Tensor:
        d = None if self.level_proj is None else self.level_proj(u)
        return level_weights(d, u.shape[:-1])


def _unit_weights(log_decay: Tensor, longest: int) -> Tensor:
    """Ones [B, T, H, L] beside log_decay [B, T, H], L enough for `longest` tokens."""
    return log_decay.new_ones(()).expand(*log_decay.shape, num_levels(longest))


def _as_levels(memory: Tensor, log_decay: Tensor) -> tuple[FenwickState, Tensor]:
    """One matrix as the state of a log-linear operator, and weights 1 [B, T, H, L] to read it with.

    Reads do not tell the levels apart, so any position will do; a power of two >= T keeps chunks
    aligned and few levels alive.
    """
    B, T, H = log_decay.shape
    position = 1 << (T - 1).bit_length()
    longest = position + T
    levels = memory.new_zeros(B, H, num_levels(longest), *memory.shape[-2:])
    levels[:, :, 0] = memory
    state = FenwickState(levels, torch.full((B,), position, dtype=torch.int64))
    return state, _unit_weights(log_decay, longest)
