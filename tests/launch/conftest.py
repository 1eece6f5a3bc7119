"""A small data set and a run config that trains on it in seconds."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import yaml

from data_prep.prepare import prepare
from data_prep.recipe import PackRequest, Source
from data_prep.tokenizer import Tokenizer, train_tokenizer

VOCAB_SIZE = 400


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    texts = {}
    for name in ("bisect", "heapq", "stat", "types"):
        path = Path(sysconfig.get_path("stdlib"), f"{name}.py")
        texts[name] = path.read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(texts[name], encoding="utf-8")
    (folder / "t.model").write_bytes(train_tokenizer(texts.values(), VOCAB_SIZE))
    request = PackRequest(
        sources=(
            Source(inputs=tuple(str(folder / f"{n}.txt") for n in ("heapq", "stat", "types"))),
            Source(inputs=(str(folder / "bisect.txt"),), split="validation"),
        ),
        row_tokens=32,
    )
    prepare(request, Tokenizer.load(folder / "t.model"), folder / "set", workers=1)
    return folder / "set"


@pytest.fixture
def config_path(dataset: Path, tmp_path: Path) -> Path:
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": {
            "vocab_size": VOCAB_SIZE,
            "d_model": 32,
            "num_layers": 1,
            "mixer": "attention",
            "max_seq_len": 32,
            "mlp": {"hidden_size": 32},
            "attention": {"num_heads": 2},
        },
        "data": {"dataset": str(dataset), "seq_len": 32},
        "batch": {"batch_tokens": 128, "micro_batch_rows": 2},
        "optimizer": {"peak_lr": 1e-3},
        "training": {"total_steps": 6},
        "checkpoint": {"every_steps": 2},
        "parallel": {"zero_stage": 1, "device": "cpu"},
        "logging": {"every_steps": 1},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
