"""From logits to the next token."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    temperature: >= 0; 0 takes the most likely token.
    top_k: sample among the k most likely tokens only.
    top_p: sample among the fewest most likely tokens that hold this much probability, in (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be >= 0 and finite: got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be >= 1: got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1]: got {self.top_p}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                "top_k and top_p need a temperature > 0: got temperature 0, which samples nothing"
            )

    def choose(self, logits: Tensor, randoms: list[torch.Generator]) -> list[int]:
        """One token for each row of logits [B, vocab_size], with the row's own random numbers."""
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        scaled = logits.double().cpu() / self.temperature
        return [self._sample(row, random) for row, random in zip(scaled, randoms, strict=True)]

    def _sample(self, scaled: Tensor, random: torch.Generator) -> int:
        probability, token = scaled.softmax(-1).sort(descending=True)
        if self.top_k is not None:
            probability = probability[: self.top_k]
        if self.top_p is not None:
            before = probability.cumsum(-1) - probability
            probability = probability[before < self.top_p]  # never empty: 0 comes before the first
        return int(token[torch.multinomial(probability, 1, generator=random)])


def row_random(seed: int, row: int) -> torch.Generator:
    """The random numbers of the prompt at place `row`."""
    return torch.Generator().manual_seed(seed * 1_000_003 + row)
