"""What the memory of a log-linear model does: lambda per level, decay, seen in one forward pass.

lambda/LAYER/level_LL, lambda_deviation/LAYER/level_LL
    mean over heads and over the tokens for which the level holds something, and the standard
    deviation over those tokens: how much content decides
decay/LAYER/mean, decay/LAYER/half_life
    mean of exp(g); median over heads and tokens of ln 2 / -g, in tokens
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from models.lambda_reading import LayerLambda, of_one_row
from models.level_weights import LevelWeights
from models.recurrent_mixer import RecurrentMixer


@dataclass
class Statistics:
    """What was seen of one row: lambda [H, L, T] and log-decay [T, H] by layer, on the CPU."""

    lambdas: list[LayerLambda] = field(default_factory=list)
    decays: dict[int, Tensor] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """The numbers of the module's docstring."""
        numbers: dict[str, float] = {}
        for layer in self.lambdas:
            mean, deviation = layer.mean.mean(0).tolist(), layer.deviation.mean(0).tolist()
            for level in range(len(mean)):
                where = f"{layer.layer}/level_{level:02d}"
                numbers[f"lambda/{where}"] = mean[level]
                numbers[f"lambda_deviation/{where}"] = deviation[level]
        for index, g in self.decays.items():
            numbers[f"decay/{index}/mean"] = float(g.exp().mean())
            numbers[f"decay/{index}/half_life"] = float(
                (math.log(2) / -g.clamp(max=-1e-9)).median()
            )
        return numbers

    def histograms(self) -> dict[str, Tensor]:
        """Lambda and decay of every layer, all values."""
        values = {f"lambda/{layer.layer}": layer.weights.flatten() for layer in self.lambdas}
        return values | {f"decay/{index}": g.exp().flatten() for index, g in self.decays.items()}


@contextmanager
def recording(blocks: Any) -> Iterator[Statistics]:
    """Fills Statistics from a forward pass of one row [1, T] without inner documents."""
    seen = Statistics()
    undo: list[Callable[[], None]] = []
    for index, block in enumerate(blocks):
        mixer = block.mixer
        if not isinstance(mixer, RecurrentMixer):
            continue
        undo.append(_record_decay(index, mixer, seen))
        if isinstance(mixer.level_weights, LevelWeights):
            hook = mixer.level_weights.register_forward_hook(_lambda_hook(index, seen))
            undo.append(hook.remove)
    try:
        yield seen
    finally:
        for action in undo:
            action()


def _record_decay(index: int, mixer: Any, seen: Statistics) -> Callable[[], None]:
    operands = mixer.operands

    def recorded(*args: Any) -> tuple[Tensor, ...]:
        values: tuple[Tensor, ...] = operands(*args)
        seen.decays[index] = values[3][0].detach().float().cpu()
        return values

    mixer.operands = recorded  # of this one module, until it is deleted again
    return lambda: delattr(mixer, "operands")


def _lambda_hook(index: int, seen: Statistics) -> Callable[[Any, Any, Tensor], None]:
    def hook(_module: Any, _inputs: Any, weights: Tensor) -> None:
        seen.lambdas.append(of_one_row(index, weights[0].detach().float().cpu()))

    return hook
