"""Generation: equal to the full forward, independent of batch neighbours, reproducible."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models import generate as generate_module
from models.config import MIXER_NAMES
from models.generate import generate
from models.language_model import LanguageModel

Build = Callable[..., LanguageModel]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7], [8, 9, 10, 11, 12, 13, 14]]


def _greedy_by_full_forward(model: LanguageModel, prompt: list[int], steps: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("mixer", MIXER_NAMES)
def test_greedy_continues_like_the_full_forward(
    mixer: str, small_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        generate_module, "PREFILL_TOKENS", 3
    )  # the longest prompt takes three calls
    model = small_model(mixer)
    expected = [_greedy_by_full_forward(model, prompt, 6) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=6) == expected


def test_sampling_depends_on_seed_and_place_alone(small_model: Build) -> None:
    model = small_model("log_linear_mamba2")
    settings: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.5}
    one = generate(model, PROMPTS, seed=1, **settings)
    assert generate(model, PROMPTS, seed=1, **settings) == one
    assert generate(model, PROMPTS, seed=2, **settings) != one
    # A neighbour of another length or other content changes nothing.
    assert generate(model, [PROMPTS[0], [30] * 9, [31, 32, 33]], seed=1, **settings)[0] == one[0]


def test_stop_ids_end_a_row_and_are_not_returned(small_model: Build) -> None:
    model = small_model("gated_deltanet")
    free = generate(model, PROMPTS, max_new_tokens=8, temperature=2.0)
    stop = free[0][3]
    stopped = generate(model, PROMPTS, max_new_tokens=8, temperature=2.0, stop_ids=[stop])
    for one, two in zip(free, stopped, strict=True):
        assert two == (one[: one.index(stop)] if stop in one else one)


def test_top_k_and_top_p_keep_the_likeliest(small_model: Build) -> None:
    model = small_model("mamba2")
    logits = model(torch.tensor([PROMPTS[0]]))[0, -1].detach()
    order = logits.argsort(descending=True).tolist()
    probability = logits.softmax(-1)[order]
    nucleus = int((probability.cumsum(0) < 0.5).sum()) + 1

    def first_tokens(**settings: Any) -> set[int]:
        tokens = generate(model, [PROMPTS[0]] * 300, max_new_tokens=1, temperature=1.0, **settings)
        return {row[0] for row in tokens}

    assert first_tokens(top_k=2) == set(order[:2])
    assert first_tokens(top_p=0.5) == set(order[:nucleus])
    assert first_tokens(top_p=1e-9) == {order[0]}
    assert len(first_tokens()) > max(2, nucleus)


def test_temperature_flattens(small_model: Build) -> None:
    model = small_model("mamba2")
    cold, hot = (
        generate(model, [PROMPTS[0]] * 200, max_new_tokens=1, temperature=t) for t in (0.05, 50.0)
    )
    assert len({row[0] for row in cold}) < 4 < 30 < len({row[0] for row in hot})


def test_no_new_tokens_are_none(small_model: Build) -> None:
    assert generate(small_model("mamba2"), PROMPTS, max_new_tokens=0) == [[], [], [], []]
    assert generate(small_model("mamba2"), [], max_new_tokens=5) == []


def test_generation_reaches_max_seq_len(small_model: Build) -> None:
    model = small_model("log_linear_gated_deltanet", max_seq_len=8)
    # The last new token is not read, so one more than max_seq_len fits.
    assert len(generate(model, [[1, 2, 3]], max_new_tokens=6)[0]) == 6
    with pytest.raises(
        ValueError,
        match=r"3 \+ 7 tokens\) too long .* got 9 tokens; expected at most .*=8; .* extend-context",
    ):
        generate(model, [[1, 2, 3]], max_new_tokens=7)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 50]], {}, "prompt 0 has token 50; expected 0 to 49"),
        ([[-1]], {}, "has token -1"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be >= 0: got -1"),
        ([[1]], {"temperature": -0.1}, "temperature must be >= 0 and finite: got -0.1"),
        ([[1]], {"temperature": float("nan")}, "temperature must be"),
        ([[1]], {"temperature": 1.0, "top_k": 0}, "top_k must be >= 1: got 0"),
        ([[1]], {"temperature": 1.0, "top_p": 1.1}, "top_p must be in .*: got 1.1"),
        ([[1]], {"top_k": 3}, "need a temperature > 0"),
    ],
)
def test_wrong_settings_are_refused(
    prompts: list[list[int]], settings: dict[str, Any], message: str, small_model: Build
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(small_model("mamba2"), prompts, **{"max_new_tokens": 2, **settings})
