"""Data sets of the Hugging Face hub, by name: hf:NAME?config=C&split=train&revision=R.

Needs the extra `datasets`. No code of a data set is run: the library reads plain files only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

PREFIX = "hf:"
OPTIONS = ("config", "split", "revision")


def is_huggingface(typed: str) -> bool:
    """Whether an input names a data set of the hub."""
    return typed.startswith(PREFIX)


@lru_cache(maxsize=4)
def load(typed: str) -> Any:
    """The data set, memory-mapped from the library's cache. ValueError in one line."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"input {typed} needs the package datasets: expected it to be installed; "
            "pip install -e '.[datasets]'"
        ) from None
    name, _, query = typed.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query))
    if not name or set(options) - set(OPTIONS):
        raise ValueError(
            f"input is not understood: got {typed}; expected hf:NAME, with any of "
            "?config=C&split=S&revision=R"
        )
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(
            name,
            options.get("config"),
            split=options.get("split", "train"),
            revision=options.get("revision"),
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        brief = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"input {typed} cannot be loaded: {brief}; check its name, config and split, and the "
            "way to the hub"
        ) from None
