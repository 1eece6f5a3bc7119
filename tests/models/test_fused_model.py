"""A whole model by its fused kernels, in Triton's interpreter, against the same in plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.dispatch import as_on_gpu, triton_interprets
from models.initialize import initialize
from models.language_model import LanguageModel

Build = Callable[..., LanguageModel]


def loss_and_gradients(
    model: LanguageModel, tokens: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    logits = model(tokens, cu_seqlens=cu_seqlens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@pytest.mark.skipif(not triton_interprets(), reason="with a GPU the kernels are compiled")
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "mixer", ["log_linear_mamba2", "mamba2", "gated_deltanet", "attention"], ids=str
)
def test_fused_model_equals_plain(mixer: Any, packed: bool, small_model: Build) -> None:
    model = small_model(mixer, num_layers=1)
    initialize(model, 1)
    tokens = torch.randint(50, (1 if packed else 2, 21), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, 5, 6, 21]) if packed else None
    plain, expected = loss_and_gradients(model, tokens, cu_seqlens)
    with as_on_gpu():
        fused, actual = loss_and_gradients(model, tokens, cu_seqlens)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        error = (gradient - expected[name]).norm() / expected[name].norm().clamp(min=1e-12)
        assert error < 1e-3, f"{name}: {float(error):.2e}"
