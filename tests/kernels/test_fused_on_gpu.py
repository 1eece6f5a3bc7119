"""The compiled fused kernels in bf16 at the sizes of models, against plain torch in fp64: one
rounding of results and gradients. Memory they do not write is filled with NaN."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels.fused.convolution import short_convolution
from kernels.fused.gates import level_softplus, step_values, swiglu
from kernels.fused.norms import add_rms_norm, gated_rms_norm, l2_norm
from kernels.fused.rotary import rotate, rotation_table

pytestmark = pytest.mark.gpu
BOUND = 5e-3
TOKENS = 1000
ENDS = torch.tensor([0, 1, 300, TOKENS])
Run = Callable[..., object]


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def fp32(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def wide(x: Tensor) -> torch.dtype:
    """What a norm gives: the projection's bf16, or fp64 in the exact run."""
    return torch.float64 if x.dtype == torch.float64 else torch.bfloat16


def cases() -> dict[str, tuple[Run, Sequence[Tensor]]]:
    D, H, V = 1536, 48, 64
    inner = H * V
    return {
        "rms_norm": (
            lambda x, w: add_rms_norm(x, None, w, 1e-5, wide(x))[1],
            [fp32(1, TOKENS, D), fp32(D)],
        ),
        "add_rms_norm": (
            lambda x, y, w: add_rms_norm(x, y, w, 1e-5, wide(x)),
            [fp32(1, TOKENS, D), bf16(1, TOKENS, D), fp32(D)],
        ),
        "gate_then_norm": (
            lambda o, p, w, d: gated_rms_norm(
                o, p[..., :inner].unflatten(-1, (H, V)), w, 1e-5, wide(o), norm_first=False,
                skip=(p[..., inner : 2 * inner].unflatten(-1, (H, V)), d),
            ),
            [bf16(1, TOKENS, H, V), bf16(1, TOKENS, 2 * inner + 48), fp32(inner), fp32(H)],
        ),
        "norm_then_gate": (
            lambda o, z, w: gated_rms_norm(o, z, w, 1e-5, wide(o), norm_first=True),
            [bf16(1, TOKENS, 6, 384), bf16(1, TOKENS, 6, 384), fp32(384)],
        ),
        "l2_norm": (lambda x: l2_norm(x, 1e-6, 192**-0.5), [bf16(1, TOKENS, 6, 192)]),
        "swiglu": (lambda g, u: swiglu(g, u), [bf16(1, TOKENS, 4096), bf16(1, TOKENS, 4096)]),
        "level_softplus": (
            lambda d, P, b: level_softplus(d, P, b),
            [bf16(1, TOKENS, H, 15), fp32(15, 15), fp32(15)],
        ),
        "step_values": (
            lambda x, dt, b, A: step_values(x, dt, b, A),
            [bf16(1, TOKENS, H, V), bf16(1, TOKENS, H), fp32(H), fp32(H)],
        ),
        "convolution": (
            lambda x, w, b: short_convolution(x, w, b),
            [bf16(2, TOKENS, 3328), fp32(3328, 4), fp32(3328)],
        ),
        "packed_convolution": (
            lambda x, w: short_convolution(x, w, None, ENDS),
            [bf16(1, TOKENS, 4608), fp32(4608, 4)],
        ),
        "rotate": (
            lambda x: rotate(x, rotation_table(96, 5e5, TOKENS, x.device), ENDS),
            [bf16(1, TOKENS, 16, 96)],
        ),
    }  # fmt: skip


NAMES = (
    "rms_norm", "add_rms_norm", "gate_then_norm", "norm_then_gate", "l2_norm", "swiglu",
    "level_softplus", "step_values", "convolution", "packed_convolution", "rotate",
)  # fmt: skip


def outputs_and_gradients(run: Run, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    random = torch.Generator("cuda").manual_seed(3)
    tangents = [
        torch.randn(o.shape, device="cuda", generator=random).bfloat16().to(o.dtype)
        for o in outputs
    ]
    return [o.detach() for o in outputs] + list(torch.autograd.grad(outputs, leaves, tangents))


@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_one_rounding_off_and_repeats(name: str) -> None:
    run, inputs = cases()[name]
    expected = outputs_and_gradients(run, [x.double() for x in inputs])
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        actual = outputs_and_gradients(run, inputs)
        again = outputs_and_gradients(run, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for i, (a, b, e) in enumerate(zip(actual, again, expected, strict=True)):
        assert torch.equal(a, b), i
        error = (a.double() - e.double()).norm() / e.double().norm()
        assert error < BOUND, f"{name} {i}: {float(error):.2e}"


def test_rows_beyond_two_to_the_31_numbers_are_reached() -> None:
    x = torch.zeros(1, 2**20 + 5, 2304, device="cuda", dtype=torch.bfloat16)
    x[0, -1] = 1
    y = swiglu(x, x)
    assert float(y[0, -1, -1]) == pytest.approx(0.7311, rel=1e-2)
    _, n = add_rms_norm(x, None, torch.ones(2304, device="cuda"), 1e-5, torch.bfloat16)
    assert float(n[0, -1, 0]) == pytest.approx(1.0, rel=1e-2)
