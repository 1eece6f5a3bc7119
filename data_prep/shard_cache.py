"""A data set that lies elsewhere, read through a local folder of limited size.

    CACHE/cache.json     {"remote": URL, "limit_bytes": N or null}; marks the folder as a cache
    CACHE/...            manifest, tokenizer and indexes as in the data set; shards as they are used

A shard is fetched when a row of it is asked for, checked against its hash before it gets its name,
and removed again, the longest unused first, when the next one would pass the limit. Only shards in
a folder with cache.json are ever removed. All processes of a machine may share one cache: a lock
serialises fetching, and a reader whose shard was removed between two rows fetches it again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import fsspec

CACHE_NAME = "cache.json"
SHARD_PATTERN = "*.mds"
ATTEMPTS = 4
TOUCH_SECONDS = 1.0
BLOCK_BYTES = 1 << 20


class ShardCache:
    """Shards of the data set that `folder` is a cache of. Safe to copy into workers."""

    def __init__(self, folder: Path) -> None:
        known = json.loads((folder / CACHE_NAME).read_bytes())
        self.folder = folder
        self.remote: str = known["remote"]
        self.limit_bytes: int | None = known["limit_bytes"]
        self._touched: dict[Path, float] = {}

    def use(self, path: Path, sha256: str, size: int) -> bool:
        """See to it that the shard is there; returns whether it was fetched, and so checked, now.

        Raises ValueError or FileNotFoundError naming the shard and its expected hash.
        """
        now = time.monotonic()
        if now - self._touched.get(path, -TOUCH_SECONDS) < TOUCH_SECONDS and path.exists():
            return False
        self._touched[path] = now
        try:
            os.utime(path)  # the cache removes what has the oldest of these
            return False
        except FileNotFoundError:
            pass
        with locked(self.folder):
            if path.exists():
                return False
            for killed in path.parent.glob(".*.tmp"):
                killed.unlink()  # whoever fetched it held the lock
            self._make_room(size)
            self._fetch(path, sha256, size)
        return True

    def _make_room(self, size: int) -> None:
        if self.limit_bytes is None:
            return
        shards = []
        for path in self.folder.glob(f"*/{SHARD_PATTERN}"):
            stat = path.stat()
            shards.append((stat.st_mtime_ns, stat.st_size, path))
        held = sum(shard_size for _, shard_size, _ in shards)
        for _, shard_size, path in sorted(shards):
            if held + size <= self.limit_bytes:
                return
            path.unlink()
            held -= shard_size

    def _fetch(self, path: Path, sha256: str, size: int) -> None:
        name = path.relative_to(self.folder).as_posix()
        wanted = f"sha256 {sha256} and {size} bytes"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with opened(self.remote, name) as source, temporary.open("wb") as target:
                digest = hashlib.sha256()
                while block := source.read(BLOCK_BYTES):
                    digest.update(block)
                    target.write(block)
            if digest.hexdigest() != sha256:
                raise ValueError(
                    f"{self.remote}/{name} is damaged: got sha256 {digest.hexdigest()}; expected "
                    f"{wanted}; copy this file again from its source"
                )
            os.replace(temporary, path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self.remote}/{name} is missing: expected {wanted}; copy this file again from "
                "its source"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)


def cache_at(folder: Path) -> ShardCache | None:
    """The cache that the folder is, if it is one."""
    return ShardCache(folder) if (folder / CACHE_NAME).is_file() else None


@contextmanager
def opened(remote: str, name: str) -> Iterator[IO[bytes]]:
    """A remote file; a store that does not answer is asked again for some seconds."""
    for attempt in range(ATTEMPTS):
        try:
            opened = fsspec.open(f"{remote.rstrip('/')}/{name}", "rb").open()
            break
        except FileNotFoundError:
            raise
        except OSError:
            if attempt + 1 == ATTEMPTS:
                raise
            time.sleep(2**attempt)
    with opened as file:
        yield file


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The one process of this machine that changes the cache."""
    with (folder / ".cache-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
