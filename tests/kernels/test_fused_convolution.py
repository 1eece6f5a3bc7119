"""Convolution + SiLU against plain torch in fp64; documents packed into a row see nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.fused.convolution import short_convolution
from tests.fused_checks import DEVICE, assert_same, random


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "D", "W", "ends"),
    [
        (1, 1, 16, 4, None),
        (3, 5, 20, 4, None),
        (2, 37, 70, 3, None),
        (1, 70, 16, 4, [1, 3, 4, 33, 70]),
        (1, 12, 8, 2, [5, 12]),
    ],
)
def test_short_convolution(
    B: int, T: int, D: int, W: int, ends: list[int] | None, with_bias: bool
) -> None:
    cu_seqlens = None if ends is None else torch.tensor([0, *ends])

    def run(x: Tensor, weight: Tensor, *bias: Tensor, backend: Any) -> tuple[Tensor]:
        part = x[..., 1 : 1 + D]  # of a wider projection
        b = bias[0] if bias else None
        return (short_convolution(part, weight, b, cu_seqlens, backend=backend),)

    inputs = [random(B, T, D + 3), random(D, W), *([random(D)] if with_bias else [])]
    assert_same(run, inputs)


@pytest.mark.parametrize("ends", [None, [1, 9, 16, 37]])
def test_slices_of_the_backward_pass_meet(
    ends: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.fused import triton_convolution

    monkeypatch.setattr(triton_convolution, "SLICE_TOKENS", 8)
    monkeypatch.setattr(triton_convolution, "BACKWARD_BLOCK_T", 4)
    cu_seqlens = None if ends is None else torch.tensor([0, *ends])

    def run(x: Tensor, weight: Tensor, bias: Tensor, backend: Any) -> tuple[Tensor]:
        return (short_convolution(x, weight, bias, cu_seqlens, backend=backend),)

    assert_same(run, [random(1, 37, 20), random(20, 4), random(20)])


def test_a_document_changes_no_bit_of_its_neighbours() -> None:
    cu_seqlens = torch.tensor([0, 9, 30, 41])
    x, weight, bias = random(1, 41, 16).to(DEVICE), random(16, 4).to(DEVICE), random(16).to(DEVICE)
    other = x.clone()
    other[:, 9:30] *= -3
    found = []
    for row in (x, other):
        row = row.requires_grad_()
        y = short_convolution(row, weight, bias, cu_seqlens, backend="triton")
        (gradient,) = torch.autograd.grad(y.square().sum(), row)
        outside = [*range(9), *range(30, 41)]
        found.append((y[:, outside], gradient[:, outside]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="weight has shape"):
        short_convolution(random(1, 5, 2), random(3, 4), None)
    with pytest.raises(ValueError, match="at most 16 tokens: got 17"):
        short_convolution(random(1, 5, 2), random(2, 17), None, backend="triton")
