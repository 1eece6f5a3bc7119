"""Near duplicates by MinHash and locality-sensitive hashing (datasketch, an optional extra).

A document is the set of its word 5-grams; PERMUTATIONS minima of their hashes estimate the Jaccard
similarity of two sets to about 1 / sqrt(PERMUTATIONS). Memory of the search: some 4 KB a document.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

PERMUTATIONS = 128
SCHEME = "affine32"  # signatures are 32-bit numbers
SHINGLE_WORDS = 5
_BATCH = 4096  # shingles at a time: [batch, PERMUTATIONS] uint64 are 4 MB
_WORD = re.compile(r"\w+")


def require_datasketch() -> None:
    """ValueError in one line where the package is missing."""
    try:
        import datasketch  # noqa: F401
    except ImportError:
        raise ValueError(
            "--near-duplicates needs the package datasketch: expected it to be installed; "
            "pip install -e '.[near-duplicates]'"
        ) from None


class Signer:
    """The signature of one document that comes in parts."""

    def __init__(self) -> None:
        from datasketch import MinHash

        self._minhash = MinHash(num_perm=PERMUTATIONS, scheme=SCHEME)
        self._words: list[str] = []
        self._rest = ""
        self._has_shingle = False

    def feed(self, part: str) -> None:
        """Take the next part."""
        text = self._rest + part.lower()
        words = _WORD.findall(text)
        self._rest = ""
        if words and text.endswith(words[-1]):
            self._rest = words.pop()
        self._take(words)

    def finish(self) -> np.ndarray:
        """[PERMUTATIONS] uint32."""
        self._take([self._rest] if self._rest else [])
        if not self._has_shingle:  # the whole document is shorter than one
            self._minhash.update(" ".join(self._words).encode())
        return np.asarray(self._minhash.hashvalues).astype(np.uint32)

    def _take(self, words: list[str]) -> None:
        words = self._words + words
        count = len(words) - SHINGLE_WORDS + 1
        for begin in range(0, count, _BATCH):
            end = min(begin + _BATCH, count)
            shingles = {" ".join(words[i : i + SHINGLE_WORDS]).encode() for i in range(begin, end)}
            self._minhash.update_batch(list(shingles))
            self._has_shingle = True
        self._words = words[max(0, count) :]


class Seen:
    """The documents kept so far."""

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHashLSH

        self._threshold = threshold
        self._index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
        self._kept: list[Any] = []

    def is_new(self, signature: np.ndarray) -> bool:
        """Whether no kept document is similar; it is kept then."""
        from datasketch import MinHash

        minhash = MinHash(num_perm=PERMUTATIONS, hashvalues=signature, scheme=SCHEME)
        for candidate in self._index.query(minhash):
            if self._kept[candidate].jaccard(minhash) >= self._threshold:
                return False
        self._index.insert(len(self._kept), minhash)
        self._kept.append(minhash)
        return True
