"""Depthwise causal convolution over a few tokens, the short memory in front of every mixer.

y_t[d] = bias[d] + sum_{i=0..W-1} weight[d, i] * x_{t-W+1+i}[d],   x before a document is 0
"""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.checks import check_shape, document_lengths
from kernels.host_tables import on_device, to_last


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The convolution above, no activation; no document sees another.

    Args:
        x: [B, T, D], any float dtype.
        weight: [D, W], cast to x's dtype.  bias: [D] or None.
        cu_seqlens: [N+1] integers from 0 to T, needs B = 1: N packed documents.
        initial_state: [N, D, W-1], the last W-1 inputs before each row or document; None = zeros.
        return_final_state: also return those after it.

    Returns:
        y [B, T, D] in x's dtype and the state [N, D, W-1] or None.

    Raises:
        ValueError: a shape or cu_seqlens does not fit.
    """
    B, T, D = x.shape
    W = weight.shape[1]
    check_shape("weight", weight, "D W", (D, W))
    lengths = document_lengths(B, T, cu_seqlens)
    if cu_seqlens is not None:
        if initial_state is None and not return_final_state:
            return _packed(x, weight, bias, lengths), None
        return _by_document(x, weight, bias, lengths, initial_state)
    if initial_state is None:
        initial_state = x.new_zeros(B, D, W - 1)
    check_shape("initial_state", initial_state, "N D W-1", (B, D, W - 1))
    padded = torch.cat([initial_state.to(x).transpose(1, 2), x], dim=1)  # [B, W-1+T, D]
    y = _weighted_sum([padded[:, i : i + T] for i in range(W)], weight, bias)
    return y, padded[:, T:].transpose(1, 2).contiguous() if return_final_state else None


def causal_conv1d_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: x [B, D], state [B, D, W-1] -> y [B, D], next state; `state` stays as it is."""
    check_shape("state", state, "B D W-1", (*x.shape, weight.shape[1] - 1))
    window = torch.cat([state.to(x), x[..., None]], dim=-1)  # [B, D, W]
    y = _weighted_sum(list(window.unbind(-1)), weight, bias)
    return y, window[..., 1:].contiguous()


def _weighted_sum(windows: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    weight = weight.to(windows[0].dtype)
    y = windows[0] * weight[:, 0]
    for i in range(1, len(windows)):
        y = y + windows[i] * weight[:, i]
    return y if bias is None else y + bias.to(y.dtype)


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: tuple[int, ...]) -> Tensor:
    """All documents at once: what a window would take from before its document becomes 0."""
    W, T = weight.shape[1], x.shape[1]
    position = document_positions(lengths, x.device)
    windows = []
    for lag in reversed(range(W)):
        earlier = torch.nn.functional.pad(x, (0, 0, lag, 0))[:, :T]
        windows.append(torch.where((position >= lag)[:, None], earlier, 0))
    return _weighted_sum(windows, weight, bias)


@lru_cache(maxsize=16)
def document_positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """[T] int32: where each token lies in its document; one for all layers of a batch."""

    def make() -> Tensor:
        position = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
        return on_device(position, device)

    return to_last(make)


def _by_document(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: tuple[int, ...],
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    outputs, states = [], []
    for n, document in enumerate(x.split(lengths, dim=1)):
        before = None if initial_state is None else initial_state[n : n + 1]
        y, state = causal_conv1d(
            document, weight, bias, initial_state=before, return_final_state=True
        )
        assert state is not None
        outputs.append(y)
        states.append(state)
    return torch.cat(outputs, dim=1), torch.cat(states)
