"""Makes a local folder the cache of a data set that lies elsewhere (data_prep/shard_cache.py)."""

from __future__ import annotations

import json
from pathlib import Path

from data_prep.dataset_folder import write_atomically
from data_prep.shard_cache import CACHE_NAME, locked, opened
from data_prep.shards import (
    INDEX_NAME,
    MANIFEST_NAME,
    ROW_LENGTHS_NAME,
    TOKENIZER_NAME,
    read_manifest,
)


def open_cache(remote: str, folder: Path, limit_bytes: int | None) -> None:
    """Make `folder` a cache of the data set at `remote`, or go on using it. Shards come later.

    Raises ValueError if the folder holds something else or the limit is too small, and
    FileNotFoundError if there is no data set at `remote`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        marker = folder / CACHE_NAME
        if not marker.exists() and (folder / MANIFEST_NAME).exists():
            raise ValueError(
                f"{folder} holds a data set of its own: expected a new folder or a cache of "
                f"{remote}; choose another data.dataset, or leave out data.remote"
            )
        known = json.loads(marker.read_bytes()) if marker.exists() else {"remote": remote}
        if known["remote"] != remote:
            raise ValueError(
                f"{folder} is a cache of {known['remote']}: got {remote}; choose another folder or "
                "remove this one"
            )
        manifest = _read_remote(remote, MANIFEST_NAME)
        if manifest is None:
            raise FileNotFoundError(
                f"{remote} is not a data set: got no {MANIFEST_NAME} there; expected a copy of the "
                "output of `python -m data_prep pack`"
            )
        local = folder / MANIFEST_NAME
        if local.exists() and local.read_bytes() != manifest:
            raise ValueError(
                f"{remote} has changed since {folder} was made: expected the same manifest.json; "
                "remove that folder to use the new data set"
            )
        content = {"remote": remote, "limit_bytes": limit_bytes}
        write_atomically(marker, (json.dumps(content) + "\n").encode())
        if not local.exists():
            _fetch_small_files(remote, folder, manifest)
            write_atomically(local, manifest)
        _check_limit(folder, limit_bytes)


def _read_remote(remote: str, name: str) -> bytes | None:
    try:
        with opened(remote, name) as file:
            return file.read()
    except FileNotFoundError:
        return None


def _fetch_small_files(remote: str, folder: Path, manifest: bytes) -> None:
    names = [TOKENIZER_NAME]
    for split in json.loads(manifest)["splits"]:
        (folder / split).mkdir(exist_ok=True)
        names += [f"{split}/{INDEX_NAME}", f"{split}/{ROW_LENGTHS_NAME}"]
    for name in names:
        content = _read_remote(remote, name)
        if content is not None:  # a task has no tokenizer; what must be there is missed by Rows
            write_atomically(folder / name, content)


def _check_limit(folder: Path, limit_bytes: int | None) -> None:
    if limit_bytes is None:
        return
    largest = 0
    for split in read_manifest(folder).splits:
        entries = json.loads((folder / split / INDEX_NAME).read_bytes())["shards"]
        largest = max(largest, *(entry["raw_data"]["bytes"] for entry in entries))
    if limit_bytes < 2 * largest:
        raise ValueError(
            f"data.cache_bytes is too small: got {limit_bytes}; expected at least {2 * largest}, "
            "twice the largest shard; raise it"
        )
