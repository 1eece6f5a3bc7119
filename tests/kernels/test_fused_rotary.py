"""Fused rotary positions against plain torch in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.fused.rotary import rotate, rotation_table
from tests.fused_checks import assert_same, random


@pytest.mark.parametrize(
    ("shape", "ends"),
    [((1, 1, 1, 8), None), ((2, 5, 3, 12), None), ((1, 17, 2, 16), [1, 4, 17])],
    ids=str,
)
def test_rotate(shape: tuple[int, ...], ends: list[int] | None) -> None:
    B, T, H, S = shape
    cu_seqlens = None if ends is None else torch.tensor([0, *ends])

    def run(wide: Tensor, backend: Any) -> tuple[Tensor]:
        x = wide[..., 1 : 1 + H * S].unflatten(-1, (H, S))
        table = rotation_table(S, 1000.0, T, x.device)
        return (rotate(x, table, cu_seqlens, backend=backend),)

    assert_same(run, [random(B, T, H * S + 3)])


def test_every_pair_turns_by_its_angle_and_keeps_its_length() -> None:
    x = torch.randn(1, 9, 2, 6, dtype=torch.float64)
    y = rotate(x, rotation_table(6, 100.0, 9, x.device))
    pairs = [torch.complex(z[..., :3], z[..., 3:]) for z in (x, y)]
    angle = torch.arange(9.0)[:, None] * 100.0 ** (-torch.arange(3.0) / 3)
    turned = pairs[0] * torch.polar(torch.ones(9, 3), angle).to(pairs[0].dtype)[None, :, None]
    torch.testing.assert_close(pairs[1], turned, rtol=1e-6, atol=1e-6)
