"""Rotary positions: each pair (x[i], x[i + S/2]) of a head turned by position * theta^(-2i / S).

On a GPU one Triton kernel in fp32, elsewhere plain torch.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.causal_conv1d import document_positions
from kernels.checks import check_shape, document_lengths
from kernels.dispatch import Backend, choose_backend
from kernels.host_tables import to_last


@lru_cache(maxsize=8)
def rotation_table(size: int, theta: float, length: int, device: torch.device) -> Tensor:
    """[2, length, size / 2] fp64: cosines and sines of positions 0..length-1.

    In fp64, for fp32 angles are off by 1e-3 at 2^14 tokens.
    """

    def make() -> Tensor:
        half = torch.arange(0, size, 2, dtype=torch.float64, device=device)
        position = torch.arange(length, dtype=torch.float64, device=device)
        angle = position[:, None] * theta ** (-half / size)
        return torch.stack([angle.cos(), angle.sin()])

    return to_last(make)


def rotate(
    x: Tensor,
    table: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """x with every token turned to its position in its row or document.

    Args:
        x: [B, T, H, S].
        table: [2, P, S / 2], of `rotation_table`; P at least the longest row or document.
        cu_seqlens: [N+1] integers on the CPU, needs B = 1: N packed documents.

    Returns:
        [B, T, H, S] in x's dtype.
    """
    B, T, _, S = x.shape
    check_shape("table", table, "2 P S/2", (2, table.shape[1], S // 2))
    obstacle = None
    if x.dtype == torch.float64:
        obstacle = "its Triton kernel does not compute in fp64"
    if choose_backend(backend, x.device, "rotate", obstacle) == "triton":
        from kernels.fused.triton_rotary import rotate_triton

        return rotate_triton(x, table, cu_seqlens)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    if cu_seqlens is None:
        turns = table[:, :T, None]
    else:
        lengths = document_lengths(B, T, cu_seqlens)
        turns = table[:, document_positions(lengths, x.device)][:, :, None]
    cos, sin = turns.to(first.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
