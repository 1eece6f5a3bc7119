"""The language model with each of its five mixers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.config import MIXER_NAMES, ModelConfig
from models.initialize import initialize
from models.language_model import LanguageModel

Build = Callable[..., LanguageModel]
EVERY_MIXER = pytest.mark.parametrize("mixer", MIXER_NAMES)
HYBRID = ("log_linear_mamba2", "attention")


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


def _close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < tolerance, f"relative error {error:.2e}"


def _logits_and_embedding_gradients(
    model: LanguageModel, tokens: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    embedded: list[Tensor] = []
    hook = model.embedding.register_forward_hook(lambda module, inputs, out: embedded.append(out))
    logits = model(tokens, cu_seqlens)
    hook.remove()
    loss_weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((logits * loss_weights).sum(), embedded)
    return logits.detach(), gradient.reshape(*tokens.shape, -1)


@EVERY_MIXER
@pytest.mark.parametrize("changed", [0, 2, 4])
def test_packed_documents_never_see_each_other(
    mixer: str, changed: int, small_model: Build
) -> None:
    model = small_model(mixer)
    # Two rows of 150; documents end before, on and after chunk boundaries, one has a single token.
    cu_seqlens = torch.tensor([0, 5, 69, 149, 150, 187, 188, 300])
    before = _tokens(2, 150)
    start, end = cu_seqlens[changed], cu_seqlens[changed + 1]
    after = before.clone()
    after.view(-1)[start:end] = (after.view(-1)[start:end] + 1) % 50
    others = torch.ones(300, dtype=torch.bool)
    others[start:end] = False
    for one, two in zip(
        _logits_and_embedding_gradients(model, before, cu_seqlens),
        _logits_and_embedding_gradients(model, after, cu_seqlens),
        strict=True,
    ):
        one, two = one.flatten(0, 1), two.flatten(0, 1)
        assert torch.equal(one[others], two[others])
        assert not torch.equal(one[~others], two[~others])


@EVERY_MIXER
def test_packed_document_equals_the_document_alone(mixer: str, small_model: Build) -> None:
    model = small_model(mixer)
    tokens = _tokens(2, 100)
    cu_seqlens = torch.tensor([0, 3, 70, 100, 164, 200])
    packed = model(tokens, cu_seqlens).view(200, -1)
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        _close(packed[start:end], model(tokens.view(1, -1)[:, start:end])[0])


@EVERY_MIXER
def test_rows_without_cu_seqlens_are_documents(mixer: str, small_model: Build) -> None:
    model, tokens = small_model(mixer), _tokens(3, 40)
    _close(model(tokens), model(tokens, torch.tensor([0, 40, 80, 120])))


@EVERY_MIXER
def test_prefix_is_unaffected_by_future_tokens(mixer: str, small_model: Build) -> None:
    model, tokens = small_model(mixer), _tokens(2, 100)
    changed = tokens.clone()
    changed[:, 70:] = (changed[:, 70:] + 1) % 50
    one, two = model(tokens), model(changed)
    _close(two[:, :70], one[:, :70])
    assert (one[:, 70:] - two[:, 70:]).abs().min(-1).values.max() > 0


@pytest.mark.parametrize("mixer", [*MIXER_NAMES, HYBRID], ids=str)
@pytest.mark.parametrize("prompt", [0, 1, 63, 64, 65, 130])
def test_prefill_then_step_equals_full_forward(
    mixer: str | tuple[str, ...], prompt: int, small_model: Build
) -> None:
    model, tokens = small_model(mixer), _tokens(3, 140)
    with torch.no_grad():
        full = model(tokens)
        logits, state = model.prefill(tokens[:, :prompt], model.empty_state(3))
        assert logits.shape == (3, prompt, 50)
        if prompt:
            _close(logits, full[:, :prompt])
        for t in range(prompt, min(prompt + 10, 140)):
            logits, state = model.step(tokens[:, t], state)
            _close(logits, full[:, t])
    assert state.position.tolist() == [prompt + 10] * 3


@EVERY_MIXER
def test_prefill_in_pieces_equals_full_forward(mixer: str, small_model: Build) -> None:
    model, tokens = small_model(mixer), _tokens(2, 200)
    with torch.no_grad():
        full = model(tokens)
        state, start = model.empty_state(2), 0
        for length in (0, 1, 63, 64, 7, 45):
            logits, state = model.prefill(tokens[:, start : start + length], state)
            if length:
                _close(logits, full[:, start : start + length])
            start += length
        logits, state = model.prefill(tokens[:, start:], state, last_only=True)
        _close(logits, full[:, -1:])


@pytest.mark.parametrize("parent", ["mamba2", "gated_deltanet"])
def test_level_weights_one_is_the_linear_parent(
    parent: str, small_config: Callable[..., ModelConfig]
) -> None:
    linear = LanguageModel(small_config(parent))
    log_linear = LanguageModel(
        small_config(f"log_linear_{parent}", level_weights={"kind": "fixed"})
    )
    for model in (linear, log_linear):  # the same seed gives shared parameters the same values
        initialize(model, 3)
    tokens = _tokens(2, 150)
    _close(log_linear(tokens), linear(tokens))
    with torch.no_grad():  # lambda = 2 on one level must show
        log_linear.get_parameter("blocks.0.mixer.level_weights.a")[:, 3] = 1.85
    assert (log_linear(tokens) - linear(tokens)).abs().max() > 1e-3


@EVERY_MIXER
def test_bf16_autocast_is_close_to_fp32(mixer: str, small_model: Build) -> None:
    model, tokens = small_model(mixer, init_std=0.05), _tokens(2, 100)
    full = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(tokens)
        half.square().mean().backward()
    assert half.dtype == torch.float32
    _close(half, full, 0.03)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all(), name


@EVERY_MIXER
def test_every_parameter_gets_a_gradient(mixer: str, small_model: Build) -> None:
    model = small_model(mixer, tie_embeddings=False)
    model(_tokens(2, 20)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0 or "level_weights" in name, name


@pytest.mark.parametrize("mixer", ["mamba2", "gated_deltanet"])
def test_state_of_a_linear_parent_is_one_matrix_per_head(mixer: str, small_model: Build) -> None:
    model = small_model(mixer)
    sizes = []
    for length in (1, 200):
        _, state = model.prefill(_tokens(1, length), model.empty_state(1))
        sizes.append([tuple(layer.memory.shape) for layer in state.layers])
    assert sizes[0] == sizes[1]
    assert len(sizes[0][0]) == 4


def test_hybrid_repeats_its_pattern(small_model: Build) -> None:
    model = small_model(["attention", "mamba2", "gated_deltanet"], num_layers=4)
    names = [type(block.mixer).__name__ for block in model.blocks]
    assert names == ["Attention", "Mamba2", "GatedDeltaNet", "Attention"]


def test_without_mlp_there_is_only_the_mixer(small_model: Build) -> None:
    model = small_model("mamba2", mlp={"hidden_size": 0})
    assert not [name for name, _ in model.named_parameters() if "mlp" in name]
    assert model(_tokens(1, 5)).shape == (1, 5, 50)


def test_tied_embeddings_have_no_output_matrix(small_model: Build) -> None:
    model = small_model("mamba2", tie_embeddings=True)
    assert "lm_head.weight" not in model.state_dict()
    assert model(_tokens(1, 5)).shape == (1, 5, 50)


@EVERY_MIXER
def test_document_longer_than_max_seq_len_is_refused(mixer: str, small_model: Build) -> None:
    model = small_model(mixer, max_seq_len=8)
    with pytest.raises(ValueError, match=r"got 9 tokens; expected at most max_seq_len=8"):
        model(_tokens(1, 9))
    assert model(_tokens(1, 16), torch.tensor([0, 8, 16])).shape == (1, 16, 50)
    _, state = model.prefill(_tokens(1, 8), model.empty_state(1))
    with pytest.raises(ValueError, match="got 9 tokens"):
        model.prefill(_tokens(1, 1), state)
    with pytest.raises(ValueError, match="got 9 tokens"):
        model.step(_tokens(1), state)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 5, 10], "must rise from 0 to B \\* T = 20"),
        ([1, 10, 20], "must rise from 0"),
        ([0, 10, 10, 20], "without empty documents"),
        ([0, 15, 20], "10 is missing"),
    ],
)
def test_cu_seqlens_that_do_not_cut_rows_are_refused(
    cu_seqlens: list[int], message: str, small_model: Build
) -> None:
    with pytest.raises(ValueError, match=message):
        small_model("mamba2")(_tokens(2, 10), torch.tensor(cu_seqlens))


@EVERY_MIXER
def test_model_learns_a_batch_by_heart(
    mixer: str, small_config: Callable[..., ModelConfig]
) -> None:
    model = LanguageModel(small_config(mixer, init_std=0.05))
    initialize(model, 0)
    tokens = _tokens(4, 33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(60):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert 3.5 < losses[0] < 4.5  # near ln 50, the loss of a model that knows nothing
    assert losses[-1] < 0.3
