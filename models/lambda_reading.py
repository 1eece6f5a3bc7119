"""Lambda made visible: what every token of a text weighs every level with.

A level's weight acts only where the level holds something: level 0 always, level l >= 1 where bit
l-1 of the position is set (kernels/levels.py). Means and deviations are over those positions; the
maps show every position, for there the weight is computed too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.levels import num_levels
from models.language_model import LanguageModel
from models.level_weights import LevelWeights


@dataclass(frozen=True)
class LayerLambda:
    """Lambda of one layer over one text: weights [H, L, T], L the levels that T tokens have."""

    layer: int
    weights: Tensor

    @property
    def live(self) -> Tensor:
        """[L, T]: whether the level holds something when the token reads."""
        L, T = self.weights.shape[1:]
        position, level = torch.arange(T), torch.arange(L)[:, None]
        return (level == 0) | ((position >> (level - 1).clamp(min=0)) & 1 == 1)

    @property
    def mean(self) -> Tensor:
        """[H, L] mean over the positions where the level holds something."""
        live = self.live
        return (self.weights * live).sum(-1) / live.sum(-1)

    @property
    def deviation(self) -> Tensor:
        """[H, L] standard deviation over the same positions: how much content decides."""
        live = self.live
        spread = (self.weights - self.mean[..., None]).square()
        return ((spread * live).sum(-1) / live.sum(-1)).sqrt()


def of_one_row(layer: int, weights: Tensor) -> LayerLambda:
    """What LevelWeights gave for one row, [T, H, levels of the model]."""
    L = num_levels(len(weights))
    return LayerLambda(layer, weights[..., :L].permute(1, 2, 0).contiguous())


@torch.no_grad()
def read_lambda(model: LanguageModel, tokens: Tensor) -> list[LayerLambda]:
    """Lambda of every log-linear layer over a text [T].

    Raises:
        ValueError: no layer has a lambda, or the text is longer than the model.
    """
    recorded: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, out: recorded.append(out[0].cpu()))
        for module in model.modules()
        if isinstance(module, LevelWeights)
    ]
    if not hooks:
        raise ValueError(
            f"the model has no lambda: got mixers {', '.join(model.config.layer_mixers)}; "
            "expected a log-linear one"
        )
    try:
        model(tokens[None])
    finally:
        for hook in hooks:
            hook.remove()
    layers = [i for i, m in enumerate(model.config.layer_mixers) if m.startswith("log_linear_")]
    return [of_one_row(layer, weights) for layer, weights in zip(layers, recorded, strict=True)]
