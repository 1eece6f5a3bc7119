"""torch.compile traces the fused operators without a break, and their results stay."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels.fused.convolution import short_convolution
from kernels.fused.gates import level_softplus, step_values, swiglu
from kernels.fused.norms import add_rms_norm, gated_rms_norm, l2_norm
from kernels.fused.rotary import rotate, rotation_table
from tests.fused_checks import DEVICE, random

FP32 = torch.float32
ENDS = torch.tensor([0, 3, 7])
CASES: dict[str, tuple[Callable[..., object], Sequence[Tensor]]] = {
    "rms_norm": (
        lambda x, w: add_rms_norm(x, None, w, 1e-5, FP32, backend="triton")[1],
        [random(2, 7, 16), random(16)],
    ),
    "add_rms_norm": (
        lambda x, y, w: add_rms_norm(x, y, w, 1e-5, FP32, backend="triton"),
        [random(2, 7, 16), random(2, 7, 16), random(16)],
    ),
    "gated_rms_norm": (
        lambda o, z, w, x, D: gated_rms_norm(
            o, z, w, 1e-5, FP32, norm_first=False, skip=(x, D), backend="triton"
        ),
        [random(7, 2, 8), random(7, 2, 8), random(16), random(7, 2, 8), random(2)],
    ),
    "l2_norm": (lambda x: l2_norm(x, 1e-6, 1.0, backend="triton"), [random(7, 2, 8)]),
    "swiglu": (lambda g, u: swiglu(g, u, backend="triton"), [random(7, 8), random(7, 8)]),
    "level_softplus": (
        lambda d, P, b: level_softplus(d, P, b, backend="triton"),
        [random(7, 2, 5), random(5, 5), random(5)],
    ),
    "step_values": (
        lambda x, dt, b, A: step_values(x, dt, b, A, backend="triton"),
        [random(1, 7, 2, 16), random(1, 7, 2), random(2), random(2)],
    ),
    "short_convolution": (
        lambda x, w, b: short_convolution(x, w, b, ENDS, backend="triton"),
        [random(1, 7, 8), random(8, 4), random(8)],
    ),
    "rotate": (
        lambda x: rotate(x, rotation_table(8, 100.0, 7, x.device), ENDS, backend="triton"),
        [random(1, 7, 2, 8)],
    ),
}


QUICK = ("add_rms_norm", "short_convolution")
"""Enough between the slow ones: one with several results, one with integers among its inputs."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_compiled_equals_eager(name: str) -> None:
    run, inputs = CASES[name]
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().to(DEVICE).requires_grad_() for x in inputs]
        out = function(*leaves)
        outputs = list(out) if isinstance(out, tuple) else [out]
        gradients = torch.autograd.grad([o.square().sum() for o in outputs], leaves)
        results.append([*outputs, *gradients])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
