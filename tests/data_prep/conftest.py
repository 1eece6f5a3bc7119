"""A small corpus and a tokenizer trained on it, made once for all tests of this folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_prep.stdlib_corpus import stdlib_files
from data_prep.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source of Python's json and logging packages, 8 files of 1 to 90 KB."""
    folder = tmp_path_factory.mktemp("texts") / "corpus"
    for name, path in stdlib_files():
        if name.startswith(("stdlib/json/", "stdlib/logging/")):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return folder


@pytest.fixture(scope="session")
def model_file(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 600 pieces."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.rglob("*.py"))]
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(train_tokenizer(texts, 600))
    return path


@pytest.fixture(scope="session")
def tokenizer(model_file: Path) -> Tokenizer:
    return Tokenizer.load(model_file)
