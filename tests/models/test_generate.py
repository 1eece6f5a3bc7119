"""Generation: equal to the full forward, independent of batch neighbours, reproducible."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models import generate as generate_module
from models.config import MIXER_NAMES
from models.decode_graph import GraphedStep
from models.decoding_state import join_states
from models.generate import generate, generate_stream
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


def test_stream_yields_the_tokens_of_generate_one_by_one(small_model: Build) -> None:
    model, settings = small_model("log_linear_mamba2"), {"max_new_tokens": 5, "temperature": 1.0}
    expected = generate(model, PROMPTS, **settings)
    stream = generate_stream(model, PROMPTS, **settings)
    first = [next(stream) for _ in PROMPTS]
    assert sorted(first) == [(row, tokens[0]) for row, tokens in enumerate(expected)]
    rest: list[list[int]] = [[token] for _, token in sorted(first)]
    for row, token in stream:
        rest[row].append(token)
    assert rest == expected


def test_batch_of_unequal_prompts_steps_together(
    small_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(("log_linear_gated_deltanet", "attention"))
    expected = [generate(model, [prompt], max_new_tokens=6)[0] for prompt in PROMPTS]
    batches = []
    step = model.step
    monkeypatch.setattr(
        model, "step", lambda tokens, state: batches.append(len(tokens)) or step(tokens, state)
    )
    assert generate(model, PROMPTS, max_new_tokens=6) == expected
    assert batches == [4] * 5
    batches.clear()
    stop = {1: expected[1][0], 3: expected[3][2]}  # finished rows leave the batch
    generate(
        model,
        PROMPTS,
        max_new_tokens=6,
        finished=lambda row, tokens: tokens[-1] == stop.get(row) and len(tokens) in (1, 3),
    )
    assert batches == [3, 3, 2, 2, 2]


def test_finished_is_asked_after_every_token(small_model: Build) -> None:
    asked: list[tuple[int, int]] = []

    def finished(row: int, tokens: list[int]) -> bool:
        asked.append((row, len(tokens)))
        return len(tokens) == row + 1

    tokens = generate(small_model("mamba2"), PROMPTS, max_new_tokens=9, finished=finished)
    assert [len(row) for row in tokens] == [1, 2, 3, 4]
    assert sorted(asked) == [(row, n) for row in range(4) for n in range(1, row + 2)]


def test_graph_needs_a_gpu(small_model: Build) -> None:
    with pytest.raises(ValueError, match="a CUDA graph needs a CUDA device: the model is on cpu"):
        generate(small_model("mamba2"), PROMPTS, max_new_tokens=2, cuda_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", [*MIXER_NAMES, ("log_linear_mamba2", "attention")], ids=str)
@pytest.mark.parametrize("window", [None, 9])
@torch.no_grad()
def test_captured_step_equals_the_step(mixer: Any, window: int | None, small_model: Build) -> None:
    sizes = {"num_heads": 2, "window": window}
    model = small_model(mixer, attention=sizes).cuda()
    tokens = torch.randint(50, (4, 200), generator=torch.Generator().manual_seed(0)).cuda()
    states = []
    for row, n in enumerate((1, 63, 64, 30)):
        _, state = model.prefill(tokens[row : row + 1, :n], model.empty_state(1))
        states.append(state)
    state = join_states(states)
    graph = GraphedStep(model, state, 70)
    for t in range(70):  # past carries of every row
        expected, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(graph(tokens[:, t]), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="captured for 134 tokens"):
        graph(tokens[:, 0])
    prompts = [row[:n].tolist() for row, n in zip(tokens, (1, 63, 64, 30), strict=True)]
    plain = generate(model, prompts, max_new_tokens=20)
    assert generate(model, prompts, max_new_tokens=20, cuda_graph=True) == plain
