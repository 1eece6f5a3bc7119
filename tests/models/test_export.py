"""`python -m models export`: whole, proven, repeatable; nothing of others touched."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from models import export as export_module
from models.__main__ import app
from models.checkpoint_directory import step_folder, write_manifest
from models.config import MIXER_NAMES
from models.export import export
from models.language_model import LanguageModel
from models.parameter_groups import decays
from models.proof import ProofError, streamed_logits
from models.tensor_files import LazyTensor, as_lazy, open_tensors
from models.weights import load_config, load_model, save_model

Build = Callable[..., LanguageModel]
FACTS = {
    "step": 7,
    "tokens": 123_456,
    "world_size": 2,
    "dataset": {"kind": "text", "train_rows": 31},
    "config": {"run_dir": "/home/someone/runs/a", "optimizer": {"peak_lr": 0.001}, "seed": 3},
}


@pytest.fixture
def run(small_model: Build, tmp_path: Path) -> Path:
    """A run with one checkpoint of a hybrid of all mixers, in shards."""
    model = small_model(MIXER_NAMES, num_layers=5, tie_embeddings=True)
    folder = step_folder(tmp_path / "run", 7)
    save_model(folder, model.state_dict(), model.config, max_shard_bytes=20_000)
    write_manifest(folder, FACTS)
    return tmp_path / "run"


def test_export_is_the_checkpoint_bit_for_bit(run: Path, tmp_path: Path) -> None:
    result = export(run, tmp_path / "out", max_shard_bytes=30_000)
    assert not result.complete_before
    assert (result.max_difference, result.rounding) == (0.0, 0.0)
    assert load_config(tmp_path / "out") == load_config(run)
    one, two = load_model(run).state_dict(), load_model(tmp_path / "out").state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert not list(tmp_path.glob(".*")), "a temporary folder is left"


def test_card_tells_how_it_was_trained_and_not_where(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in (
        "| tokens | 123,456 |",
        "| optimizer.peak_lr | 0.001 |",
        "| data: train_rows | 31",
    ):
        assert fact in card
    assert "someone" not in card
    assert "someone" not in (tmp_path / "out" / "export.json").read_text()
    export(tmp_path / "out", tmp_path / "again")
    assert "No training record" in (tmp_path / "again" / "README.md").read_text()


def test_bf16_rounds_matrices_and_nothing_else(run: Path, tmp_path: Path) -> None:
    result = export(run, tmp_path / "out", dtype="bf16")
    assert result.max_difference == 0.0 < result.rounding < 1
    exact = load_model(run).state_dict()
    for name, tensor in open_tensors(tmp_path / "out").items():
        assert tensor.dtype == (torch.bfloat16 if decays(name) else torch.float32)
        assert torch.equal(tensor.load(), exact[name].to(tensor.dtype))


def test_blocks_are_in_memory_one_at_a_time_while_logits_are_compared(small_model: Build) -> None:
    model = small_model(MIXER_NAMES, num_layers=5)
    state = model.state_dict()
    loads: list[str] = []

    def named(name: str, tensor: LazyTensor) -> LazyTensor:
        def load() -> Tensor:
            loads.append(name)
            return tensor.load()

        return LazyTensor(tensor.shape, tensor.dtype, load)

    tokens = torch.arange(30)[None] % 50
    lazy = {name: named(name, tensor) for name, tensor in as_lazy(state).items()}
    assert torch.equal(streamed_logits(model.config, lazy, tokens), model(tokens))
    blocks = [name.split(".")[1] for name in loads if name.startswith("blocks.")]
    assert blocks == sorted(blocks), "a block is loaded when its turn comes"
    assert len(loads) == len(set(loads)) == len(state)


def test_again_is_complete_and_anything_else_is_refused(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(run, out)
    before = _content(out)
    assert export(run, out).complete_before
    assert _content(out) == before
    with pytest.raises(ValueError, match=r"result of another command \(other dtype\): got .*out"):
        export(run, out, dtype="bf16")
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"damaged: .*model.safetensors is missing or changed"):
        export(run, out)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="output holds files of something else"):
        export(run, foreign)
    assert _content(foreign) == {"thesis.tex": b"years of work"}
    (tmp_path / "empty").mkdir()
    assert not export(run, tmp_path / "empty").complete_before


def test_what_a_killed_export_left_is_in_nobodys_way(run: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    (partial / "deeper").mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    export(run, tmp_path / "out")
    assert not partial.exists()
    assert "deeper" not in _content(tmp_path / "out")


def test_two_exports_do_not_write_one_output(run: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    other = os.open(partial, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="being written by another process"):
        export(run, tmp_path / "out")
    os.close(other)
    export(run, tmp_path / "out")


def test_a_result_that_computes_something_else_is_not_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_wrongly(folder: Path, tensors: Mapping[str, LazyTensor], *rest: Any) -> None:
        wrong = {name: t.load() for name, t in tensors.items()}
        wrong["norm.weight"] = wrong["norm.weight"] * 1.01
        save_model(folder, wrong, *rest)

    monkeypatch.setattr(export_module, "write_model", write_wrongly)
    with pytest.raises(ProofError, match="computes other logits: they differ by up to"):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    result = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out")])
    assert result.exit_code == 1


def test_an_error_while_writing_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def raising() -> Iterator[None]:
        monkeypatch.setattr(export_module, "write_model", _interrupted)
        yield
        monkeypatch.undo()

    with raising(), pytest.raises(KeyboardInterrupt):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_damaged_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    shard = sorted(step_folder(run, 7).glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"step-00000007 is not complete: .* recorded sha256"):
        export(step_folder(run, 7), tmp_path / "out")


def test_command_line(run: Path, tmp_path: Path) -> None:
    arguments = ["export", str(run), str(tmp_path / "out"), "--dtype", "bf16"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0
    assert "rounding to bf16 moves the logits of the sample by at most 0." in first.output
    assert "differ from the source's by at most 0\n" in first.output
    assert "is complete: nothing to do" in CliRunner().invoke(app, arguments).output
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings == {"do_sample": False}  # no tokenizer, so no ids


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt
