"""Stand-in models, and a small trained tokenizer, data set and model directory."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_prep.prepare import prepare
from data_prep.recipe import PackRequest, Source
from data_prep.tokenizer import Tokenizer, train_tokenizer
from eval.result import Subject
from models.config import ModelConfig
from models.initialize import initialize
from models.language_model import LanguageModel
from models.weights import save_model

VOCAB_SIZE = 400
ROW_TOKENS = 64


class StandIn:
    """A model whose logits are a function of its input tokens [B, T]."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        self.logits = logits
        self.longest_input = 0

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        self.longest_input = max(self.longest_input, tokens.shape[1])
        return self.logits(tokens)


def _uniform(vocab_size: int) -> StandIn:
    """Every token equally likely."""
    return StandIn(lambda tokens: torch.zeros(*tokens.shape, vocab_size))


def _certain(vocab_size: int, next_tokens: Callable[[Tensor], Tensor]) -> StandIn:
    """All probability on next_tokens(tokens) [B, T]."""

    def logits(tokens: Tensor) -> Tensor:
        chosen = next_tokens(tokens)
        return 1e4 * torch.nn.functional.one_hot(chosen, vocab_size).float()

    return StandIn(logits)


@pytest.fixture(scope="session")
def stand_in() -> type[StandIn]:
    return StandIn


@pytest.fixture(scope="session")
def uniform() -> Callable[[int], StandIn]:
    return _uniform


@pytest.fixture(scope="session")
def certain() -> Callable[..., StandIn]:
    return _certain


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real text, outside the repository; the test is skipped where it is not there."""
    folder = Path("../shared/data").resolve()
    if not folder.is_dir():
        pytest.skip("needs ../shared/data")
    return folder


@pytest.fixture(scope="session")
def source_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few of Python's own modules as text."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("bisect", "colorsys", "heapq", "keyword", "stat", "token", "types", "this"):
        text = Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer_path(source_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [path.read_text(encoding="utf-8") for path in sorted(source_folder.iterdir())]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_tokenizer(texts, VOCAB_SIZE))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_path)


@pytest.fixture(scope="session")
def dataset(
    source_folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("data") / "set"
    validation = (str(source_folder / "stat.txt"), str(source_folder / "bisect.txt"))
    sources = (
        Source(inputs=(str(source_folder / "types.txt"),)),
        Source(inputs=validation, split="validation"),
    )
    request = PackRequest(sources=sources, row_tokens=ROW_TOKENS)
    prepare(request, tokenizer, folder, workers=1)
    return folder


@pytest.fixture(scope="session")
def model_dir(tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained one-layer model with max_seq_len 1024."""
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        d_model=32,
        num_layers=1,
        mixer="attention",
        max_seq_len=1024,
        mlp={"hidden_size": 32},
        attention={"num_heads": 2},
    )
    model = LanguageModel(config)
    initialize(model, 0)
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(folder, model.state_dict(), config, tokenizer_path)
    return folder


@pytest.fixture
def subject(tokenizer: Tokenizer) -> Callable[..., Subject]:
    """subject(model, max_seq_len): a Subject around a stand-in."""

    def make(model: StandIn, max_seq_len: int = 32) -> Subject:
        return Subject(
            model=model,
            vocab_size=tokenizer.vocab_size,
            max_seq_len=max_seq_len,
            tokenizer=tokenizer,
            device="cpu",
        )

    return make
