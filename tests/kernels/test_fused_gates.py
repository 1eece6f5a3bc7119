"""Fused gates against plain torch in fp64: in Triton's interpreter on a CPU, compiled on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.fused.gates import level_softplus, step_values, swiglu
from tests.fused_checks import assert_same, random


@pytest.mark.parametrize("shape", [(1,), (3, 5, 24), (2, 1100)], ids=str)
def test_swiglu(shape: tuple[int, ...]) -> None:
    def run(gate: Tensor, up: Tensor, backend: Any) -> tuple[Tensor]:
        return (swiglu(gate, up, backend=backend),)

    assert_same(run, [3 * random(*shape), random(*shape)])


@pytest.mark.parametrize(("shape", "W"), [((1, 1, 1), 1), ((2, 5, 7), 15), ((1, 90, 3), 21)])
def test_level_softplus(shape: tuple[int, ...], W: int) -> None:
    def run(d: Tensor, P: Tensor, b: Tensor, backend: Any) -> tuple[Tensor]:
        return (level_softplus(d, P, b, backend=backend),)

    # Logits from far below zero to above 20, where softplus is the identity.
    assert_same(run, [6 * random(*shape, W), random(W, W), random(W)])


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 5, 3, 24), (1, 70, 2, 16)], ids=str)
def test_step_values(shape: tuple[int, ...]) -> None:
    B, T, H, V = shape
    wide = random(B, T, H * V + H + 3)  # parts of a projection

    def run(wide: Tensor, dt_bias: Tensor, A_log: Tensor, backend: Any) -> tuple[Tensor, Tensor]:
        x, dt, _ = wide.split((H * V, H, 3), dim=-1)
        return step_values(x.unflatten(-1, (H, V)), dt, dt_bias, A_log, backend=backend)

    assert_same(run, [wide, 10 * random(H), random(H).abs().log()])


def test_other_shapes_and_dtypes_are_refused_or_left_to_torch() -> None:
    with pytest.raises(ValueError, match="up has shape"):
        swiglu(random(2, 3), random(2, 4))
    with pytest.raises(ValueError, match="P has shape"):
        level_softplus(random(2, 3), random(3, 4), random(3))
    with pytest.raises(ValueError, match="at most 64 levels: got 65"):
        level_softplus(random(2, 65), random(65, 65), random(65), backend="triton")
    with pytest.raises(ValueError, match="does not compute in fp64"):
        swiglu(random(2).double(), random(2).double(), backend="triton")
    assert swiglu(random(2).double(), random(2).double()).dtype == torch.float64
