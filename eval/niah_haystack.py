"""Where needles are hidden: one repeated line, lines of other needles, or real text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from eval.text_files import read_text

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_SENTENCE_END = re.compile(r"[.!?][\"')\]\u2019\u201d]*$")
_SENTENCE_START = re.compile(r"[\"'(\[\u2018\u201c]*[A-Z]|[\"'\u2018\u201c]")


class Essays:
    """A text as words, white space collapsed, cut into sentences; it starts again where it ends."""

    def __init__(self, text: str) -> None:
        self.words = text.split()
        if not self.words:
            raise ValueError("the haystack is empty: got only white space; expected some text")
        self.text = " ".join(self.words)
        self.sha256 = sha256(self.text.encode()).hexdigest()
        self._ends = [*sentence_ends(self.words), len(self.words)]

    @classmethod
    def load(cls, path: Path) -> Essays:
        """A text file, or a .json object or list of texts (RULER's form), plain or .xz.

        Raises ValueError where the file is not there, not text or empty.
        """
        text = read_text(path)
        if path.name.removesuffix(".xz").endswith(".json"):
            try:
                content = json.loads(text)
            except ValueError:
                raise ValueError(
                    f"haystack is not JSON: got {path}; expected an object with a text, or plain "
                    "text under another name"
                ) from None
            text = "\n".join(_strings(content))
        return cls(text)

    def context(self, words: int, needles: Sequence[str], depths: Sequence[float]) -> str:
        """The first `words` words with each needle between two sentences.

        Args:
            depths: percent of the sentences before each needle, rising.
        """
        rounds, rest = divmod(words, len(self.words))
        text = self.words * rounds + self.words[:rest]
        ends = [
            end + lap * len(self.words)
            for lap in range(rounds + 1)
            for end in self._ends
            if end + lap * len(self.words) < words
        ]
        bounds = [0, *ends, words]  # sentence i is text[bounds[i] : bounds[i + 1]]
        sentences = len(bounds) - 1
        pieces, start = [], 0
        for needle, depth in zip(needles, depths, strict=True):
            end = bounds[int(sentences * depth / 100)]
            pieces += [*text[start:end], needle]
            start = end
        return " ".join([*pieces, *text[start:]])


def sentence_ends(words: Sequence[str]) -> list[int]:
    """Places after which a sentence begins: words[i - 1] ends in . ! or ? (and closing quotes or
    brackets), and words[i] starts with a capital letter or a quote."""
    ends = [i + 1 for i, word in enumerate(words) if _SENTENCE_END.search(word)]
    return [i for i in ends if i < len(words) and _SENTENCE_START.match(words[i])]


def _strings(content: object) -> list[str]:
    """Every text in a JSON value, in order."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, dict):
        content = list(content.values())
    return (
        [text for part in content for text in _strings(part)] if isinstance(content, list) else []
    )
