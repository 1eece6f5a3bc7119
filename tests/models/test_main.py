"""`python -m models`."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_prep.tokenizer import train_tokenizer
from models import __main__ as command
from models.accounting import state_bytes
from models.checkpoint_directory import step_folder, write_manifest
from models.config import PRESETS, ModelConfig
from models.generation_settings import GenerationSettings
from models.language_model import LanguageModel
from models.weights import load_model, save_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run("inspect", ...) -> (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["models", *arguments])
        with pytest.raises(SystemExit) as stop:
            command.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


@pytest.fixture(scope="module")
def checkpoint(
    small_model: Callable[..., LanguageModel], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run folder with one complete checkpoint and a tokenizer."""
    run_dir = tmp_path_factory.mktemp("run")
    text = Path(pytest.__file__).read_text()
    tokenizer = run_dir / "tokenizer.model"
    tokenizer.write_bytes(train_tokenizer([text], 400))
    model = small_model("log_linear_mamba2", vocab_size=400)
    save_model(step_folder(run_dir, 7), model.state_dict(), model.config, tokenizer)
    write_manifest(step_folder(run_dir, 7), {"step": 7})
    return run_dir


def test_generate_prints_prompt_and_continuation(checkpoint: Path, run: Run) -> None:
    arguments = ["generate", str(checkpoint), "--prompt", "import pytest", "--prompt", "def"]
    code, out, err = run(*arguments, "--max-new-tokens", "5", "--temperature", "1", "--seed", "3")
    assert (code, err) == (0, "")
    first, second = out.split("-" * 40 + "\n")
    assert first.startswith("import pytest")
    assert len(first) > len("import pytest\n")
    assert second.startswith("def")


def test_generate_samples_where_the_settings_of_the_model_say_so(
    checkpoint: Path, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(step_folder(checkpoint, 7), folder)
    (folder / "checkpoint.json").unlink()
    command = ("generate", str(folder), "--prompt", "import", "--max-new-tokens", "9")
    greedy = run(*command)
    GenerationSettings(do_sample=True).save(folder)
    assert run(*command) == run(*command, "--temperature", "1")
    assert run(*command, "--temperature", "0") == greedy


def test_generate_streams_the_same_text(checkpoint: Path, run: Run) -> None:
    arguments = ["generate", str(checkpoint), "--prompt", "import", "--max-new-tokens", "9"]
    code, out, err = run(*arguments, "--stream")
    assert (code, err) == (0, "")
    assert (0, out, "") == run(*arguments)


def test_generate_reads_prompt_files_and_stops_at_texts(
    checkpoint: Path, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("import pytest")
    arguments = ["generate", str(checkpoint), "--max-new-tokens", "9"]
    _, shown, _ = run(*arguments, "--prompt", "import pytest")
    code, out, err = run(*arguments, "--prompt-file", str(tmp_path / "prompt.txt"))
    assert (code, err, "import pytest" + out) == (0, "", shown)
    stop = out[2:4]
    _, stopped, _ = run(*arguments, "--prompt-file", str(tmp_path / "prompt.txt"), "--stop", stop)
    assert stopped == out[: out.index(stop)] + "\n"


def test_extend_context_writes_a_longer_model(checkpoint: Path, run: Run, tmp_path: Path) -> None:
    output = tmp_path / "longer"
    code, out, err = run(
        *("extend-context", str(checkpoint), str(output), "--max-seq-len", "1000", "--rule", "one")
    )
    assert (code, err) == (0, "")
    assert "max_seq_len 256 -> 1000, levels 9 -> 11" in out
    assert "equal bit for bit" in out
    before, after = load_model(checkpoint), load_model(output)
    tokens = torch.arange(256)[None]
    assert torch.equal(before(tokens), after(tokens))
    assert after(torch.arange(1000)[None] % 400).isfinite().all()
    code, out, _ = run("generate", str(output), "--prompt", "import", "--max-new-tokens", "300")
    assert code == 0
    again = ("extend-context", str(checkpoint), str(output), "--max-seq-len", "1000")
    code, out, _ = run(*again, "--rule", "one")
    assert (code, out) == (0, f"{output} is complete: nothing to do\n")
    code, _, err = run(*again)
    assert code == 2
    assert "output is the result of another command (other rule)" in err


@pytest.mark.parametrize("preset", ["tiny-log-linear-mamba2", "0.8b-attention-24-layers"])
def test_inspect_shows_a_preset(preset: str, run: Run) -> None:
    code, out, err = run("inspect", preset)
    assert (code, err) == (0, "")
    assert "embedding.weight" in out
    assert "1,048,576 *" in out
    assert ("777,856,512" in out) == (preset == "0.8b-attention-24-layers")


def test_inspect_shows_a_run(checkpoint: Path, run: Run) -> None:
    code, out, _ = run("inspect", str(checkpoint))
    assert code == 0
    assert "2 log_linear_mamba2" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "tiny-mamba3"), "error: no such model: got tiny-mamba3; .*preset is tiny-mam"),
        (("generate", "nowhere", "--prompt", "x"), "error: no checkpoint: nowhere is not a folder"),
        (("generate", "RUN", "--prompt", "x", "--top-k", "3"), "error: top_k .* temperature > 0"),
        (
            ("generate", "RUN", "--prompt", "x", "--device", "cuda:99"),
            "error: no such device: got cuda:99, with",
        ),
        (
            ("generate", "RUN", "--prompt", "x", "--device", "warp"),
            "error: unknown device: got warp",
        ),
        (
            ("generate", "RUN", "--prompt", "x", "--max-new-tokens", "300"),
            "error: prompt 0 .*too long .* extend-context CHECKPOINT OUTPUT --max-seq-len 512",
        ),
        (("generate", "RUN"), "error: nothing to continue: give --prompt TEXT or"),
        (("generate", "RUN", "--prompt-file", "nowhere"), "error: no prompt file: nowhere"),
        (
            ("generate", "RUN", "--prompt", "x", "--prompt", "y", "--stream"),
            "error: --stream needs one prompt: got 2",
        ),
        (("generate", "RUN", "--prompt", "x", "--stop", ""), "error: a stop text is empty"),
        (
            ("extend-context", "RUN", "nowhere", "--max-seq-len", "256"),
            "error: max_seq_len must grow: got 256",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, checkpoint: Path, run: Run
) -> None:
    code, out, err = run(*(str(checkpoint) if a == "RUN" else a for a in arguments))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1

    assert re.match(message, err), err


def test_model_directory_without_tokenizer_is_named(
    small_model: Callable[..., LanguageModel], tmp_path: Path, run: Run
) -> None:
    model = small_model("mamba2")
    save_model(tmp_path, model.state_dict(), model.config)
    code, _, err = run("generate", str(tmp_path), "--prompt", "x")
    assert code == 2
    assert "tokenizer.model does not exist" in err


def test_bench_decode_shows_speed_and_memory(run: Run) -> None:
    arguments = ("--contexts", "100,1000000", "--batches", "1,2", "--steps", "2", "--prefill", "64")
    code, out, err = run("bench-decode", "tiny-log-linear-mamba2", "tiny-attention", *arguments)
    assert (code, err) == (0, "")
    log_linear, attention = out.split("tiny-attention")
    rows = [
        line.split() for line in log_linear.splitlines() if line.strip().startswith("1,000,000")
    ]
    assert [row[1] for row in rows] == ["1", "2"]
    assert rows[0][4] == rows[1][4] == f"{state_bytes(_at_a_million(), 2**20) / 2**20:.2f}"
    assert "needs 3.8 GiB" in " ".join(attention.split())


def _at_a_million() -> ModelConfig:
    return PRESETS["tiny-log-linear-mamba2"].model_copy(update={"max_seq_len": 2**20})


def test_inspect_names_the_settings(
    small_model: Callable[..., LanguageModel], tmp_path: Path, run: Run
) -> None:
    model = small_model(
        ("log_linear_mamba2", "attention"),
        attention={"num_heads": 4, "num_kv_heads": 2, "window": 64, "qk_norm": True},
        level_weights={"tied_above": 5},
        logit_soft_cap=30.0,
    )
    save_model(tmp_path, model.state_dict(), model.config)
    code, out, _ = run("inspect", str(tmp_path))
    out = " ".join(out.split())
    assert code == 0
    for words in (
        "levels above 5 share a weight",
        "attention 4 heads, 2 key/value heads, window 64, QK-norm",
        "logits capped at 30",
        "blocks.*.mixer.q_norm.weight [8]",
        "blocks.*.mixer.level_weights.b [7]",
    ):
        assert words in out
