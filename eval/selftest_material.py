"""What `eval selftest` puts before the tasks: drawn texts in files, a tokenizer trained on them.

The words come from eval/words.py, so nothing is read or fetched; some of the text has the marks
that WikiText's detokeniser changes.
"""

from __future__ import annotations

import random
from pathlib import Path

from data_prep.tokenizer import Tokenizer, train_tokenizer
from eval.niah_haystack import Essays
from eval.result import Subject
from eval.scoring import Model
from eval.words import ADJECTIVES, NOUNS

WINDOW = 128
VOCAB_SIZE = 700


class Material:
    """Drawn texts in files, and a tokenizer trained on them."""

    def __init__(self, folder: Path) -> None:
        rng = random.Random(0)
        articles = [_article(rng, title) for title in ("First Thing", "Second Thing", "Third")]
        self.raw = "".join(articles)
        self.raw_file = folder / "wiki.test.raw"
        self.tokens_file = folder / "wiki.test.tokens"
        self.essay_file = folder / "essay.txt"
        self.text_files = [folder / f"text{i}.txt" for i in range(len(articles))]
        essay = " ".join(_sentence(rng).capitalize() + "." for _ in range(150))
        self.essays = Essays(essay)
        for path, text in [
            (self.raw_file, self.raw),
            (self.tokens_file, self.raw),
            (self.essay_file, essay),
            *zip(self.text_files, articles, strict=True),
        ]:
            path.write_text(text, encoding="utf-8", newline="")
        self.tokenizer = Tokenizer(train_tokenizer([self.raw, essay], VOCAB_SIZE))

    def subject(self, model: Model, max_seq_len: int = WINDOW) -> Subject:
        return Subject(
            model=model,
            vocab_size=self.tokenizer.vocab_size,
            max_seq_len=max_seq_len,
            tokenizer=self.tokenizer,
            device="cpu",
        )


def _sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(NOUNS if rng.random() < 0.6 else ADJECTIVES) for _ in range(9))


def _article(rng: random.Random, title: str) -> str:
    """In WikiText's form, with what its detokeniser changes."""
    lines = [" \n", f" = {title} = \n", " \n"]
    for _ in range(6):
        number = f"{rng.randint(1, 9)} @,@ {rng.randint(100, 999)}"
        words = f"{_sentence(rng)} , {number} ( {_sentence(rng)} )"
        lines += [f" {words} ; {_sentence(rng)} 's . \n", " \n"]
    return "".join(lines)
