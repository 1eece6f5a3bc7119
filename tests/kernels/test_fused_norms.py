"""Fused norms against plain torch in fp64: in Triton's interpreter on a CPU, compiled on a GPU."""

from typing import Any

import pytest
from torch import Tensor

from kernels.fused.norms import add_rms_norm, gated_rms_norm, l2_norm
from tests.fused_checks import assert_same, random

EPS = 1e-5


@pytest.mark.parametrize("with_y", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 5, 48), (1, 7, 130)], ids=str)
def test_add_rms_norm(shape: tuple[int, ...], with_y: bool) -> None:
    x, y, weight = random(*shape), random(*shape), random(shape[-1])
    inputs = [x, y, weight] if with_y else [x, weight]

    def run(*tensors: Tensor, backend: Any) -> tuple[Tensor, Tensor]:
        x, *y, weight = tensors
        s, n = add_rms_norm(x, y[0] if y else None, weight, EPS, x.dtype, backend=backend)
        # The stream goes on in both.
        return s * 2, n

    assert_same(run, inputs)


@pytest.mark.parametrize("shape", [(2, 3, 2, 16), (1, 5, 3, 20)], ids=str)
@pytest.mark.parametrize("form", ["norm first", "gate first", "skip"])
def test_gated_rms_norm(shape: tuple[int, ...], form: str) -> None:
    B, T, H, V = shape
    wide = random(B, T, 2 * H * V + 3)  # gate and skip are parts of projections
    norm_first = form == "norm first"
    inputs = [random(*shape), wide, random(V if norm_first else H * V), random(H)]

    def run(o: Tensor, wide: Tensor, weight: Tensor, D: Tensor, backend: Any) -> tuple[Tensor]:
        gate, x, _ = wide.split((H * V, H * V, 3), dim=-1)
        gate, x = gate.unflatten(-1, (H, V)), x.unflatten(-1, (H, V))
        skip = (x, D) if form == "skip" else None
        out = gated_rms_norm(
            o, gate, weight, EPS, o.dtype, norm_first=norm_first, skip=skip, backend=backend
        )
        return (out if skip else out + 0 * D[:, None],)

    assert_same(run, inputs)


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 5, 3, 24)], ids=str)
def test_l2_norm(shape: tuple[int, ...]) -> None:
    B, T, H, K = shape
    wide = random(B, T, H * K + 5)

    def run(wide: Tensor, backend: Any) -> tuple[Tensor]:
        x = wide[..., 2 : 2 + H * K].unflatten(-1, (H, K))
        return (l2_norm(x, 1e-6, 0.3, backend=backend),)

    assert_same(run, [wide])
