"""The chunked loss against plain cross-entropy: value and every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.config import ModelConfig
from models.initialize import initialize
from models.language_model import LanguageModel
from pretrain.config import RunConfig
from pretrain.loss import SummedLoss

CPU = torch.device("cpu")


def model_of(settings: dict[str, Any], **changes: Any) -> LanguageModel:
    model = settings["model"] | changes
    built = LanguageModel(ModelConfig.model_validate(model))
    initialize(built, seed=0)
    return built


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (2, 31), generator=random)
    labels = tokens.roll(-1, 1)
    labels[0, 5:17] = -100
    labels[1] = labels[1].where(torch.arange(31) % 3 > 0, -100)
    return tokens, labels


def gradients(model: LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk", [1, 7, 62, 1000])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_equals_plain_cross_entropy(
    settings: dict[str, Any], chunk: int, tied: bool, cap: float | None, z_loss: float
) -> None:
    model = model_of(settings, tie_embeddings=tied, logit_soft_cap=cap)
    tokens, labels = batch()
    logits = model(tokens).flatten(0, 1)
    nll = cross_entropy(logits, labels.flatten(), reduction="sum")
    squares = (logits.logsumexp(-1).square() * (labels.flatten() != -100)).sum()
    expected = gradients(model, 0.5 * (nll + z_loss * squares))
    objective, found = SummedLoss(model, CPU, "fp32", z_loss, chunk)(tokens, labels, None)
    torch.testing.assert_close(found, nll.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(objective.detach(), (nll + z_loss * squares).detach())
    actual = gradients(model, 0.5 * objective)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=2e-4, atol=2e-5, msg=name)


def test_bf16_rounds_products_only(settings: dict[str, Any]) -> None:
    model = model_of(settings)
    tokens, labels = batch()
    _, exact = SummedLoss(model, CPU, "fp32")(tokens, labels, None)
    objective, rounded = SummedLoss(model, CPU, "bf16", chunk_tokens=8)(tokens, labels, None)
    assert rounded.dtype == torch.float32
    assert rounded != exact
    assert rounded.item() == pytest.approx(exact.item(), rel=1e-2)
    assert {g.dtype for g in gradients(model, objective).values()} == {torch.float32}


def test_all_logits_never_exist(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(settings)
    tokens, labels = batch()
    shapes = []
    log_softmax = Tensor.log_softmax

    def noted(x: Tensor, dim: int, **options: Any) -> Tensor:
        shapes.append(x.shape)
        return log_softmax(x, dim, **options)

    monkeypatch.setattr(Tensor, "log_softmax", noted)
    SummedLoss(model, CPU, "fp32", chunk_tokens=16)(tokens, labels, None)
    assert [shape[0] for shape in shapes] == [16, 16, 16, 14]


def test_a_batch_without_a_label_that_counts_is_0(settings: dict[str, Any]) -> None:
    model = model_of(settings)
    tokens, labels = batch()
    objective, nll = SummedLoss(model, CPU, "fp32")(tokens, torch.full_like(labels, -100), None)
    assert (objective.item(), nll.item()) == (0.0, 0.0)
    assert all(g.eq(0).all() for g in gradients(model, objective).values())


def test_evaluation_makes_no_gradient(settings: dict[str, Any]) -> None:
    config = RunConfig.model_validate(settings)
    model = model_of(settings)
    tokens, labels = batch()
    with torch.no_grad():
        objective, _ = SummedLoss(model, CPU, config.parallel.precision)(tokens, labels, None)
    assert not objective.requires_grad
