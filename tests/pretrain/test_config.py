"""RunConfig: what is accepted, what is refused and in which words, and the shipped configs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from data_prep.shards import read_manifest
from models.accounting import parameter_count
from models.config import PRESETS
from models.language_model import LanguageModel
from pretrain.__main__ import app
from pretrain.config import RunConfig, check_data, dump_config, load_config

SHIPPED = sorted((Path(__file__).parents[2] / "pretrain" / "configs").glob("*.yaml"))


@pytest.fixture
def refusal(settings: dict[str, Any], write_config: Any) -> Any:
    """The message with which the small run is refused after some overrides."""

    def refuse(*overrides: str) -> str:
        with pytest.raises(ValueError) as caught:
            load_config(write_config(settings), overrides)
        return str(caught.value)

    return refuse


def test_dumped_config_loads_to_an_equal_one(
    settings: dict[str, Any], write_config: Any, tmp_path: Path
) -> None:
    config = load_config(write_config(settings), ["optimizer.peak_lr=1e-3"])
    assert config.optimizer.peak_lr == 1e-3
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


def test_later_override_wins_and_null_is_none(settings: dict[str, Any], write_config: Any) -> None:
    changes = ["seed=4", "seed=5", "validation.every_steps=null", "optimizer.betas=[0.8, 0.9]"]
    config = load_config(write_config(settings), changes)
    assert config.seed == 5
    assert config.validation.every_steps is None
    assert config.optimizer.betas == (0.8, 0.9)


def test_preset_is_the_ground_and_single_settings_change_it(
    settings: dict[str, Any], write_config: Any
) -> None:
    settings["model"] = {"preset": "tiny-log-linear-mamba2", "mamba2": {"state_size": 16}}
    model = load_config(write_config(settings), ["model.d_model=64"]).model
    preset = PRESETS["tiny-log-linear-mamba2"]
    mamba2 = preset.mamba2.model_copy(update={"state_size": 16})
    assert model == preset.model_copy(update={"d_model": 64, "mamba2": mamba2})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.peek_lr=1", "got optimizer.peek_lr; did you mean optimizer.peak_lr?"),
        ("warmup_steps=1", "did you mean schedule.warmup_steps?"),
        ("model.level_weight.kind=fixed", "did you mean model.level_weights?"),
        ("zzz=1", "unknown setting: got zzz"),
        ("optimizer.peak_lr=-1", "optimizer.peak_lr is wrong: got -1; expected greater than 0"),
        ("parallel.zero_stage=4", "parallel.zero_stage is wrong: got 4; expected 0, 1, 2 or 3"),
        ("optimizer.betas=[1, 2]", "optimizer.betas is wrong: got [1, 2]; expected two numbers"),
        ("optimizer.peak_lr=.nan", "optimizer.peak_lr is wrong: got nan"),
        ("schedule.decay_steps=3", "schedule.decay_steps acts on schedule.kind wsd only"),
        ("schedule.kind=wsd", "schedule.decay_steps is missing"),
        ("schedule.warmup_steps=11", "got 11 + 0; expected at most training.total_steps=10"),
        ("data.seq_len=128", "expected at most model.max_seq_len=64"),
        ("batch.batch_tokens=100", "batch.micro_batch_rows * ranks = 32 * 1 * 1 = 32"),
        ("model.gated_deltanet.key_size=20", "key_size must be a multiple of 16"),
        ("model.mamba2.head_size=48", "mamba2.head_size=48 does not divide"),
        ("model.preset=tiny-loglinear-mamba2", "did you mean tiny-log-linear-mamba2?"),
        ("data=3", "data is wrong: got 3"),
        ("data.dataset=null", "data.dataset is wrong: got None"),
        ("seed", "override is not understood: got 'seed'; expected section.key=value"),
        ("a..b=1", "override is not understood"),
        ("seed=[1", "value of seed is not YAML"),
    ],
)  # fmt: skip
def test_wrong_setting_is_refused_in_one_line(refusal: Any, override: str, words: str) -> None:
    message = refusal(override)
    assert words in message
    assert len(message.splitlines()) == 1


def test_every_fault_gets_its_line(refusal: Any) -> None:
    message = refusal("optimizer.peek_lr=1", "optimizer.peak_lr=0", "training.total_steps=0")
    assert len(message.splitlines()) == 3


def test_missing_setting_is_named(settings: dict[str, Any], refusal: Any) -> None:
    del settings["training"]
    del settings["data"]["seq_len"]
    assert refusal().splitlines() == [
        "setting is missing: expected data.seq_len",
        "setting is missing: expected training",
    ]


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "\x00"])
def test_file_without_settings_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^\S+ (is not YAML|holds no settings)"):
        load_config(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no config: got"):
        load_config(tmp_path / "none.yaml")


def test_python_objects_in_a_config_are_not_made(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run_dir: !!python/object/apply:os.mkdir [made]\n")
    with pytest.raises(ValueError, match="is not YAML"):
        load_config(path)


@pytest.mark.parametrize(
    ("change", "ranks", "words"),
    [
        ({"batch": {"batch_tokens": 96, "micro_batch_rows": 1}}, 2,
         "32 * 1 * 2 = 64; use 64 or 128"),
        ({"data": {"seq_len": 24}, "batch": {"batch_tokens": 24, "micro_batch_rows": 1}}, 1,
         "got 24; expected a divisor of row_tokens=64"),
        ({"model": {"vocab_size": 63}}, 1, "got 63; expected at least 64"),
    ],
)  # fmt: skip
def test_config_that_does_not_fit_the_data_is_refused(
    settings: dict[str, Any], dataset: Path, change: dict[str, Any], ranks: int, words: str
) -> None:
    for section, values in change.items():
        settings[section].update(values)
    config = RunConfig.model_validate(settings)
    with pytest.raises(ValueError) as caught:
        check_data(config, read_manifest(dataset), ranks)
    assert words in str(caught.value)


def test_validation_without_validation_rows_is_refused(
    settings: dict[str, Any], dataset: Path
) -> None:
    manifest = read_manifest(dataset)
    manifest = manifest.model_copy(update={"splits": {"train": manifest.splits["train"]}})
    with pytest.raises(ValueError, match="no validation rows"):
        check_data(RunConfig.model_validate(settings), manifest, 1)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_config_builds_and_has_the_parameters_of_the_formula(path: Path) -> None:
    config = load_config(path)
    with torch.device("meta"):
        model = LanguageModel(config.model)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config.model)


@pytest.mark.parametrize(
    ("name", "parameters", "published_millions"),
    [
        ("0.8b-mamba2", "802,225,872", 802),
        ("0.8b-log-linear-mamba2", "825,469,407", 825),
        ("0.8b-gated-deltanet", "792,785,532", 793),
        ("0.8b-log-linear-gated-deltanet", "795,707,787", 796),
        ("0.8b-attention", "692,912,640", 693),
        ("0.8b-attention-24-layers", "777,856,512", 778),
    ],
)
def test_dry_run_of_the_papers_models_shows_their_published_size(
    dataset: Path, name: str, parameters: str, published_millions: int
) -> None:
    """Guo et al., arXiv 2506.04761, table of language models: rounded to millions."""
    path = next(path for path in SHIPPED if path.stem == name)
    model = load_config(path).model
    assert (model.d_model, model.vocab_size, model.max_seq_len) == (1536, 32_000, 16_384)
    assert model.num_layers == (24 if "24" in name else 21)
    assert (model.mamba2_num_heads, model.mamba2.head_size, model.mamba2.state_size) == (
        48,
        64,
        128,
    )
    delta = model.gated_deltanet
    assert (delta.num_heads, delta.key_size, delta.value_size) == (6, 192, 384)
    assert load_config(path).data.seq_len == 16_384
    small = ["data.seq_len=64", "batch.batch_tokens=64", "validation.rows=1"]
    shown = CliRunner().invoke(
        app, ["train", str(path), "--dry-run", f"data.dataset={dataset}", *small]
    )
    assert shown.exit_code == 0, shown.output
    assert f" {parameters} parameters, " in shown.output
    assert round(int(parameters.replace(",", "")) / 1e6) == published_millions
