"""An exported folder in a process that has torch, transformers and sentencepiece only."""

import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from data_prep.tokenizer import Tokenizer, train_tokenizer
from models.config import MIXER_NAMES, ModelConfig
from models.export import export
from models.generate import generate
from models.import_model import import_model
from models.initialize import initialize
from models.language_model import LanguageModel
from models.tensor_files import open_tensors
from models.weights import save_model

ROOT = Path(__file__).parent.parent.parent
TEXTS = [
    "def f(x):\n\treturn x  # caf\u00e9 \u2581 <s></s>\U0001f600\r\n",
    "",
    "a",
    " \u2581\u2581 \x00<0x41> <unk>",
]
PROMPTS = ["def ", "the quick brown text\n", "x"]
ROWS = [[1, 5, 9, 300, 4, 7, 8, 9, 33, 100, 2, 7], [3] * 12]


class Session:
    """A model of all mixers, its exported folder, and what the clean process saw of it."""

    def __init__(self, folder: Path) -> None:
        pieces = folder / "pieces.model"
        pieces.write_bytes(train_tokenizer([inspect.getsource(textwrap)], 512))
        self.tokenizer = Tokenizer.load(pieces)
        config = ModelConfig.model_validate(
            {
                "vocab_size": 512,
                "d_model": 32,
                "num_layers": 5,
                "mixer": MIXER_NAMES,
                "max_seq_len": 256,
                "init_std": 0.2,
                "tie_embeddings": True,
                "mlp": {"hidden_size": 48},
                "mamba2": {"head_size": 16, "state_size": 32},
                "gated_deltanet": {"num_heads": 2, "key_size": 16, "value_size": 32},
                "attention": {"num_heads": 2},
            }
        )
        self.model = LanguageModel(config)
        initialize(self.model, 0)
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "level_weights" in name:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=random))
        self.model.eval()
        save_model(folder / "ours", self.model.state_dict(), config, pieces)
        self.folder = folder / "hugging_face"
        self.exported = export(
            folder / "ours", self.folder, format="huggingface", max_shard_bytes=60_000
        )
        request = {
            "path": [p for p in sys.path if p and Path(p).resolve() not in (ROOT, ROOT / "tests")],
            "folder": str(self.folder),
            "scratch": str(folder),
            "texts": TEXTS,
            "prompts": PROMPTS,
            "rows": ROWS,
            "new": 20,
            "max_seq_len": config.max_seq_len,
        }
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                str(Path(__file__).with_name("huggingface_session.py")),
                json.dumps(request),
            ],
            cwd=folder,
            env={**os.environ, "HF_MODULES_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        self.seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        self.scratch = folder


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session(tmp_path_factory.mktemp("huggingface"))


def test_export_proves_itself(session: Session) -> None:
    assert session.exported.max_difference < 1e-5
    assert session.exported.tokens > 100


def test_nothing_of_the_repository_is_there(session: Session) -> None:
    assert session.seen["imported"] == []
    assert session.seen["config"] == [512, 32, 256]


@torch.no_grad()
def test_same_logits_and_loss(session: Session) -> None:
    wanted = session.model(torch.tensor(ROWS))
    torch.testing.assert_close(torch.tensor(session.seen["logits"]), wanted, rtol=0, atol=1e-5)
    labels = torch.tensor(ROWS)
    labels[:, :3] = -100
    loss = F.cross_entropy(wanted[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert session.seen["loss"] == pytest.approx(float(loss), abs=1e-5)


@torch.no_grad()
def test_cache_and_padding_change_no_logits(session: Session) -> None:
    wanted = session.model(torch.tensor(ROWS))
    found = torch.tensor(session.seen["cached_logits"])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    for prompt, logits in zip(_prompts(session), session.seen["padded_logits"], strict=True):
        alone = session.model(torch.tensor([prompt]))[0]
        torch.testing.assert_close(torch.tensor(logits), alone, rtol=0, atol=1e-4)


def test_same_greedy_text_of_unequal_prompts(session: Session) -> None:
    eos = session.tokenizer.eos_id
    wanted = generate(session.model, _prompts(session), max_new_tokens=20, stop_ids=(eos,))
    for name in ("greedy", "greedy_without_cache"):
        found = [_until(eos, tokens) for tokens in session.seen[name]]
        assert found == wanted
    assert session.seen["padded_with"] == 0


def test_beams_take_their_memory_along(session: Session) -> None:
    assert session.seen["beams"] == session.seen["beams_without_cache"]


def test_same_tokens_and_exact_text(session: Session) -> None:
    ids = [session.tokenizer.encode(text) for text in TEXTS]
    assert session.seen["ids"] == session.seen["ids_again"] == ids
    assert session.seen["with_bos"] == [session.tokenizer.bos_id, *ids[0]]
    assert session.seen["decoded"] == TEXTS
    assert session.seen["specials"] == [f"<s>{TEXTS[0]}</s>", TEXTS[0]]


def test_what_cannot_be_done_is_refused_by_name(session: Session) -> None:
    right, long, embeds = session.seen["errors"]
    assert right.startswith("prompts of unequal length must be padded on the left")
    assert long.startswith("document too long for the model: got 257 tokens")
    assert embeds.startswith("inputs_embeds is not supported")


@torch.no_grad()
def test_bf16_keeps_gates_in_fp32(session: Session) -> None:
    dtypes = session.seen["half_dtypes"]
    fp32 = {name.split(".")[-1] for name, dtype in dtypes.items() if dtype == "torch.float32"}
    assert {"A_log", "dt_bias", "D", "W1", "W2", "b"} <= fp32
    assert dtypes["model.blocks.0.mixer.in_proj.weight"] == "torch.bfloat16"
    wanted = session.model(torch.tensor(ROWS))
    found = torch.tensor(session.seen["half_logits"])
    assert 0 < (found - wanted).norm() < 0.05 * wanted.norm()
    assert session.seen["half_generates"] == [2, 8]


def test_a_model_made_from_the_config_is_initialised(session: Session) -> None:
    assert session.seen["fresh_logits_are_finite"] == [True, True]
    assert session.seen["fresh_dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert session.seen["fresh_differs"]


@pytest.mark.parametrize("saved_by", ["us", "transformers"])
def test_import_back_is_bit_equal(session: Session, saved_by: str, tmp_path: Path) -> None:
    folder = session.folder if saved_by == "us" else session.scratch / "model"
    import_model(folder, tmp_path / "back")
    back = open_tensors(tmp_path / "back")
    wanted = session.model.state_dict()
    assert back.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].load(), tensor)
    if saved_by == "us":
        assert Tokenizer.load(tmp_path / "back" / "tokenizer.model").model == (
            session.tokenizer.model
        )


def test_an_exported_folder_is_no_model_directory(session: Session, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a Hugging Face folder .* models import"):
        export(session.folder, tmp_path / "out")


def _prompts(session: Session) -> list[list[int]]:
    return [[session.tokenizer.bos_id, *session.tokenizer.encode(text)] for text in PROMPTS]


def _until(stop: int, tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(stop)] if stop in tokens else tokens
