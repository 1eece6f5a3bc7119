"""Training documents that share long n-grams of words with evaluation texts.

A word is a run of letters and digits, lower-cased; everything between words is passed over, so that
line breaks and punctuation do not hide a copy. Words become 64-bit hashes, n-grams a polynomial of
them modulo 2^64; a false match needs a collision of 64 bits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from data_prep.formats import Document
from data_prep.sources import UNIT_BYTES, list_files, make_units, read_documents

_WORD = re.compile(r"\w+")
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class EvaluationTexts:
    """The n-grams of evaluation texts. Safe to pickle."""

    def __init__(self, files: Sequence[str], words: int) -> None:
        """Read the files, inputs as list_files takes them; ValueError if they hold no n-gram."""
        self.words = words
        self.names: list[str] = []
        self.short: list[str] = []  # texts of fewer words, which nothing can match
        vocabulary: dict[str, int] = {}
        hashes, owners = [], []
        digest = hashlib.sha256()
        for unit in make_units(list_files(files), UNIT_BYTES):
            for document in read_documents(unit):
                if not isinstance(document, Document):
                    continue
                text = document.text
                digest.update(text.encode())
                found = _WORD.findall(text.lower())
                for word in found:
                    if word not in vocabulary:
                        vocabulary[word] = _hash(word)
                if len(found) < words:
                    self.short.append(document.name)
                    continue
                grams = np.unique(
                    _grams(np.array([vocabulary[w] for w in found], np.uint64), words)
                )
                hashes.append(grams)
                owners.append(np.full(len(grams), len(self.names), np.uint32))
                self.names.append(document.name)
        if not hashes:
            raise ValueError(
                f"exclude-overlap has nothing to look for: got {', '.join(files)} without a text "
                f"of {words} words; expected evaluation texts; check the files or lower "
                "--overlap-words"
            )
        every = np.concatenate(hashes)
        self.hashes, first = np.unique(every, return_index=True)
        self.owners = np.concatenate(owners)[first]
        self.vocabulary = vocabulary
        self.sha256 = digest.hexdigest()


class Matcher:
    """Looks for evaluation texts in one document that comes in parts."""

    def __init__(self, texts: EvaluationTexts) -> None:
        self._texts = texts
        self._rest = ""
        self._ids = np.empty(0, np.uint64)
        self._owner: int | None = None

    def feed(self, part: str) -> None:
        """Take the next part."""
        if self._owner is not None:
            return
        text = self._rest + part.lower()
        words = _WORD.findall(text)
        self._rest = ""
        if words and text.endswith(words[-1]):
            self._rest = words.pop()  # the next part may go on with it
        self._look(words)

    def finish(self) -> str | None:
        """The evaluation text that the document shares an n-gram with, or None."""
        if self._owner is None and self._rest:
            self._look([self._rest])
        return None if self._owner is None else self._texts.names[self._owner]

    def _look(self, words: Iterable[str]) -> None:
        texts = self._texts
        ids = np.fromiter(map(texts.vocabulary.get, words, repeat(0)), np.uint64)
        ids = np.concatenate([self._ids, ids])
        self._ids = ids[max(0, len(ids) - texts.words + 1) :]
        if len(ids) < texts.words:
            return
        unknown = np.cumsum(np.concatenate([[0], ids == 0]))
        known = unknown[texts.words :] == unknown[: -texts.words]
        if not known.any():
            return
        grams = _grams(ids, texts.words)[known]
        places = np.searchsorted(texts.hashes, grams).clip(max=len(texts.hashes) - 1)
        hits = np.flatnonzero(texts.hashes[places] == grams)
        if len(hits):
            self._owner = int(texts.owners[places[hits[0]]])


def _grams(ids: np.ndarray, words: int) -> np.ndarray:
    """[len - words + 1] uint64: sum over k of ids[i + k] * factor^k, modulo 2^64."""
    count = len(ids) - words + 1
    grams = np.zeros(count, np.uint64)
    for k in range(words):
        grams += ids[k : k + count] * np.uint64(pow(_FACTOR, k, _MASK + 1))
    return grams


def _hash(word: str) -> int:
    """Never 0, which stands for words that no evaluation text has."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big") | 1
