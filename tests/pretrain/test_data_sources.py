"""Which data sets a run reads: elsewhere through a cache, several by weight, damaged ones."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep.shards import IGNORED_LABEL, pack_command, read_manifest
from data_prep.tokenizer import train_tokenizer
from data_prep.training_rows import MixedRows, TrainingRows
from pretrain.config import RunConfig, checked_manifest
from pretrain.data import training_batches, training_rows
from pretrain.errors import TrainingFailed


def config_of(settings: dict[str, Any], **data: Any) -> RunConfig:
    return RunConfig.model_validate(settings | {"data": settings["data"] | data})


def copy_of(dataset: Path, folder: Path, **facts: Any) -> Path:
    """The data set under another name, with other facts in its manifest."""
    shutil.copytree(dataset, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | facts))
    return folder


def test_a_run_reads_a_data_set_elsewhere_through_its_cache(
    settings: dict[str, Any], dataset: Path, tmp_path: Path
) -> None:
    near = config_of(settings)
    far = config_of(settings, dataset=tmp_path / "cache", remote=f"file://{dataset}")
    assert checked_manifest(far, 1) == checked_manifest(near, 1)
    assert not list((tmp_path / "cache").rglob("*.mds"))
    for config in (far, near):
        checked_manifest(config, 1)  # again, as the next start does
    batches = [list(training_batches(training_rows(c.data), c, 0, 1, 0)) for c in (far, near)]
    for theirs, ours in zip(*batches, strict=True):
        assert all((a.tokens == b.tokens).all() for a, b in zip(theirs, ours, strict=True))


def test_a_limit_without_a_place_to_fetch_from_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="data.cache_bytes acts with data.remote only: got 5"):
        config_of(settings, cache_bytes=5)


def test_mixed_data_sets_must_fit_each_other(
    settings: dict[str, Any], dataset: Path, tmp_path: Path
) -> None:
    def mixed(name: str, **facts: Any) -> RunConfig:
        folder = copy_of(dataset, tmp_path / name, **facts)
        return config_of(settings, mixed_with=[{"dataset": folder, "weight": 0.5}])

    good = mixed("good")
    checked_manifest(good, 1)
    assert isinstance(training_rows(good.data), MixedRows)
    other = "0" * 64
    with pytest.raises(ValueError, match=f"different tokenizers: got .*{other}; expected None"):
        checked_manifest(mixed("tokenizer", tokenizer_sha256=other), 1)
    with pytest.raises(ValueError, match=r"seq_len does not divide the rows of .*rows: got 32"):
        checked_manifest(mixed("rows", row_tokens=48), 1)
    with pytest.raises(ValueError, match=r"smaller than that of .*vocabulary"):
        checked_manifest(mixed("vocabulary", vocab_size=99999), 1)
    with pytest.raises(FileNotFoundError, match="is not a data set"):
        checked_manifest(config_of(settings, mixed_with=[{"dataset": "x", "weight": 1}]), 1)


def test_another_tokenizer_beside_the_rows_is_refused_with_both_hashes(
    settings: dict[str, Any], dataset: Path, tmp_path: Path
) -> None:
    text = Path(json.__file__).read_text(encoding="utf-8")
    model = train_tokenizer([text], 400)
    found = hashlib.sha256(model).hexdigest()
    for expected in (found, "0" * 64):
        folder = copy_of(dataset, tmp_path / expected, tokenizer_sha256=expected)
        (folder / "tokenizer.model").write_bytes(model)
        config = config_of(settings, dataset=folder)
        if expected == found:
            checked_manifest(config, 1)
            continue
        with pytest.raises(ValueError, match=f"got sha256 {found}; expected {expected}"):
            checked_manifest(config, 1)


def test_a_longer_sequence_is_refused_with_the_command_that_prepares_it(
    settings: dict[str, Any], dataset: Path, tmp_path: Path
) -> None:
    arguments = ["corpus/", "--seed", "3", "--order", "longest-first"]
    folder = copy_of(dataset, tmp_path / "d", arguments=arguments)
    settings["model"]["max_seq_len"] = 128
    settings["batch"] = {"batch_tokens": 128, "micro_batch_rows": 1}
    command = pack_command(read_manifest(folder), folder, 128)
    assert command == (
        "python -m data_prep pack corpus/ --seed 3 --order longest-first --tokenizer "
        f"{folder}/tokenizer.model --output {folder}-128 --row-tokens 128"
    )
    with pytest.raises(ValueError, match=f"prepare it anew: {re.escape(command)}"):
        checked_manifest(config_of(settings, dataset=folder, seq_len=128), 1)


def test_rows_of_a_damaged_shard_stop_the_run_or_count_for_nothing(
    settings: dict[str, Any], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(dataset, tmp_path / "d")
    shard = next((folder / "train").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    for setting in ("stop", "skip"):
        config = config_of(settings, dataset=folder, damaged_shards=setting)
        if setting == "skip":
            with pytest.raises(ValueError, match=f"no training shard of {folder} can be read: "):
                training_rows(config.data)
        rows = TrainingRows(folder, "train", 32, damaged=config.data.damaged_shards)
        batches = training_batches(rows, config, 0, 1, 0)
        if setting == "stop":
            with pytest.raises(
                TrainingFailed, match=rf"{shard.name} is damaged: .*expected sha256"
            ):
                next(batches)
        else:
            for update in batches:
                assert all((batch.labels == IGNORED_LABEL).all() for batch in update)
    warned = capsys.readouterr().err
    assert warned.count(f"warning: rows are skipped: {shard}") == 1
