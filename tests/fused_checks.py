"""How a fused operator is held to plain torch: results and every gradient, traced too."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.dispatch import as_on_gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Run = Callable[..., Sequence[Tensor]]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape)


def differentiated(
    run: Run, inputs: Sequence[Tensor], tangents: Sequence[Tensor] | None, backend: str
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = list(run(*leaves, backend=backend))
    if tangents is None:
        tangents = [torch.ones_like(result) for result in results]
    tangents = [t.to(r) for t, r in zip(tangents, results, strict=True)]
    return [r.detach() for r in results], list(torch.autograd.grad(results, leaves, tangents))


def assert_same(run: Run, inputs: Sequence[Tensor], tolerance: float = 1e-5) -> None:
    """The Triton kernels in the inputs' dtype equal torch in fp64; so do shapes and dtypes of what
    fake tensors see."""
    inputs = [x.to(DEVICE) for x in inputs]
    exact = [x.double() for x in inputs]
    shapes = [r.shape for r in run(*exact, backend="auto")]
    tangents = [torch.randn(shape, device=DEVICE) for shape in shapes]
    expected = differentiated(run, exact, tangents, "auto")
    actual = differentiated(run, inputs, tangents, "triton")
    for what, found, wanted in zip(("result", "gradient"), actual, expected, strict=True):
        for i, (a, e) in enumerate(zip(found, wanted, strict=True)):
            error = (a.double() - e).norm() / e.norm().clamp(min=1e-30)
            assert error < tolerance, f"{what} {i}: relative error {float(error):.2e}"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, as_on_gpu():
        fakes = [mode.from_tensor(x) for x in inputs]
        traced = differentiated(run, fakes, None, "auto")
    for found, wanted in zip(traced, actual, strict=True):
        facts = [(tuple(x.shape), x.dtype) for x in found]
        assert facts == [(tuple(x.shape), x.dtype) for x in wanted]
