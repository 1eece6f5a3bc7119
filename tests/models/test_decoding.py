"""Reading a text in any pieces gives the logits of reading it at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.dispatch import triton_interprets
from kernels.state import LazyFenwickState
from models.accounting import state_bytes
from models.config import MIXER_NAMES
from models.decode_graph import FixedStep
from models.decoding_state import copy_state, held_bytes, join_states, map_tensors, pick_rows
from models.generate import generate, read_prompt
from models.initialize import initialize
from models.language_model import LanguageModel, ModelState

Build = Callable[..., LanguageModel]
WINDOWED = {"num_heads": 2, "num_kv_heads": 1, "window": 40, "qk_norm": True}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{mixer: (mixer, {}) for mixer in MIXER_NAMES},
    "hybrid": (("log_linear_mamba2", "attention"), {"attention": WINDOWED, "logit_soft_cap": 3.0}),
    "window": ("attention", {"attention": WINDOWED}),
    "tied": ("log_linear_gated_deltanet", {"level_weights": {"tied_above": 3}}),
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def _model(small_model: Build, variant: str, **fields: Any) -> LanguageModel:
    mixer, settings = VARIANTS[variant]
    return small_model(mixer, **{**settings, **fields})


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


def _close(actual: Tensor, expected: Tensor, what: object) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, f"{what}: relative error {error:.2e}"


@EVERY_VARIANT
@torch.no_grad()
def test_every_prompt_length_to_200_then_steps_equal_full_forward(
    variant: str, small_model: Build
) -> None:
    model, tokens = _model(small_model, variant), _tokens(1, 203)
    full = model(tokens)
    for n in range(201):
        logits, state = model.prefill(tokens[:, :n], model.empty_state(1))
        if n:
            _close(logits, full[:, :n], n)
        for t in range(n, n + 3):
            logits, state = model.step(tokens[:, t], state)
            _close(logits, full[:, t], (n, t))


@EVERY_VARIANT
@torch.no_grad()
def test_steps_across_every_power_of_two_to_4096_equal_full_forward(
    variant: str, small_model: Build
) -> None:
    model, tokens = _model(small_model, variant, max_seq_len=4099), _tokens(2, 4099)
    full = model(tokens)
    state, read = model.empty_state(2), 0
    for power in (2**i for i in range(3, 13)):
        _, state = read_prompt(model, tokens[:, read : power - 1], state)
        for t in range(power - 1, power + 2):
            logits, state = model.step(tokens[:, t], state)
            _close(logits, full[:, t], t)
        read = power + 2


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["log_linear_mamba2", "log_linear_gated_deltanet"])
@torch.no_grad()
def test_4096_steps_equal_full_forward_in_fp64(variant: str, small_model: Build) -> None:
    """In fp32 so many roundings in another order come to 1.1e-5 for the delta rule."""
    model = _model(small_model, variant, max_seq_len=4100, num_layers=1).double()
    tokens = _tokens(1, 4100)
    full, state = model(tokens), model.empty_state(1)
    for t in range(4100):
        logits, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(logits, full[:, t], rtol=1e-9, atol=1e-9)


@EVERY_VARIANT
@torch.no_grad()
def test_rows_at_different_positions_step_together(variant: str, small_model: Build) -> None:
    model, tokens = _model(small_model, variant), _tokens(5, 200)
    lengths = [64, 1, 63, 0, 130]
    full = model(tokens)
    states = []
    for row, n in enumerate(lengths):
        _, state = model.prefill(tokens[row : row + 1, :n], model.empty_state(1))
        states.append(state)
    joined = join_states(states)
    assert joined.position.tolist() == lengths
    for t in range(66):
        now = torch.stack([tokens[row, n + t] for row, n in enumerate(lengths)])
        logits, joined = model.step(now, joined)
        for row, n in enumerate(lengths):
            _close(logits[row], full[row, n + t], (row, t))
    # Rows at different positions may also read several tokens at once.
    more = torch.stack([tokens[row, n + 66 : n + 70] for row, n in enumerate(lengths)])
    logits, joined = model.prefill(more, joined)
    for row, n in enumerate(lengths):
        _close(logits[row], full[row, n + 66 : n + 70], row)
    picked = pick_rows(joined, [4, 0])
    now = torch.stack([tokens[4, lengths[4] + 69], tokens[0, lengths[0] + 69]])
    logits, _ = model.step(now, picked)
    same, _ = model.step(torch.stack([now[1], *now[:1].repeat(3), now[0]]), joined)
    _close(logits, same[[4, 0]], "picked")


@EVERY_VARIANT
@torch.no_grad()
def test_copied_state_is_not_touched_by_steps(variant: str, small_model: Build) -> None:
    model, tokens = _model(small_model, variant), _tokens(2, 60)
    _, state = model.prefill(tokens[:, :50], model.empty_state(2))
    kept = copy_state(state)
    first, _ = model.step(tokens[:, 50], state)
    model.step(tokens[:, 51], state)
    again, _ = model.step(tokens[:, 50], kept)
    assert torch.equal(first, again)


@pytest.mark.parametrize("mixer", [*MIXER_NAMES, ("log_linear_mamba2", "attention")], ids=str)
def test_bf16_decoding_has_the_argmax_of_the_full_forward(mixer: Any, small_model: Build) -> None:
    """On a model that has learned its batch: argmax of an untrained one is noise."""
    model, tokens = small_model(mixer, init_std=0.05), _tokens(4, 41)
    initialize(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(60):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.4
    with torch.no_grad():
        full = model(tokens).argmax(-1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for n in (0, 1, 15, 16, 33):
                logits, state = model.prefill(tokens[:, :n], model.empty_state(4))
                got = [logits.argmax(-1)]
                for t in range(n, 40):
                    logits, state = model.step(tokens[:, t], state)
                    got.append(logits.argmax(-1)[:, None])
                # The first token of a row is read without any context to tell the rows apart.
                assert torch.equal(torch.cat(got, 1)[:, 1:], full[:, 1:40]), n


MILLION = 2**20


def _at_position(state: ModelState, position: int) -> ModelState:
    """The same memory as if `position` tokens had been read."""
    layers = []
    for layer in state.layers:
        memory = type(layer.memory)(layer.memory.levels, torch.tensor([position]))
        layers.append(type(layer)(layer.conv, memory))
    return ModelState(tuple(layers), torch.tensor([position]))


@pytest.mark.parametrize("mixer", ["log_linear_mamba2", "log_linear_gated_deltanet"])
@torch.no_grad()
def test_memory_at_a_million_tokens_is_that_of_21_levels(mixer: str, small_model: Build) -> None:
    model = small_model(mixer, max_seq_len=MILLION, num_layers=1)
    assert model.config.num_levels == 21
    expected = state_bytes(model.config, MILLION)
    assert expected < 600_000
    _, state = read_prompt(model, _tokens(1, 20_000), model.empty_state(1))
    assert held_bytes(state) == expected
    layer = state.layers[0]
    live = [bool(level.any()) for level in layer.memory.levels[0].unbind(1)]
    assert live == [True] + [bool(19_999 >> bit & 1) for bit in range(20)]
    # Level by level up to the last token that has a weight, past every carry on the way.
    state = _at_position(state, MILLION - 5)
    for _ in range(5):
        logits, state = model.step(_tokens(1), state)
        assert logits.isfinite().all()
        assert held_bytes(state) == expected
    assert state.position.tolist() == [MILLION]
    with pytest.raises(ValueError, match="got 1048577 tokens; .*max_seq_len=1048576; cut it$"):
        model.step(_tokens(1), state)


def test_too_long_input_names_the_command_that_helps(small_model: Build) -> None:
    model = small_model("log_linear_mamba2", max_seq_len=100)
    command = "python -m models extend-context CHECKPOINT OUTPUT --max-seq-len 128$"
    for read in (
        lambda: model(_tokens(1, 101)),
        lambda: model.prefill(_tokens(1, 101), model.empty_state(1)),
        lambda: generate(model, [[1] * 100], max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match=command):
            read()


@pytest.mark.parametrize("variant", ["hybrid", "log_linear_gated_deltanet", "mamba2", "window"])
@torch.no_grad()
def test_a_step_on_fixed_tensors_equals_the_step(variant: str, small_model: Build) -> None:
    """What a CUDA graph holds; in place, where Triton's kernel does it, by its interpreter."""
    model, tokens = _model(small_model, variant), _tokens(3, 80)
    states = []
    for row, n in enumerate((1, 31, 63)):
        _, state = model.prefill(tokens[row : row + 1, :n], model.empty_state(1))
        states.append(state)
    state = join_states(states)
    fixed = FixedStep(model, state, 63 + 4)
    fixed.warm_up()
    mixers = [type(block.mixer).__name__ for block in model.blocks]
    lazy = [
        isinstance(getattr(layer, "memory", 0), LazyFenwickState) for layer in fixed.state.layers
    ]
    if triton_interprets() and variant == "hybrid":
        assert lazy == [mixer == "Mamba2" for mixer in mixers]
    held = [tensor.data_ptr() for tensor in _tensors(fixed.state)]
    for t in range(4):  # past a carry of every row
        expected, state = model.step(tokens[:, t], state)
        fixed.tokens.copy_(tokens[:, t])
        _close(fixed.run(), expected, t)
    assert held == [tensor.data_ptr() for tensor in _tensors(fixed.state)]


def _tensors(part: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(part, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found
