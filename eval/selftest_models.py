"""Models whose scores are known: oracles, a uniform and a random one, n-grams."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from data_prep.mqar import MqarTask
from data_prep.selective_copy import BLANK, SEPARATOR, SelectiveCopyTask
from data_prep.tokenizer import Tokenizer

CERTAIN = 60.0  # a logit beside zeros: the rest of any vocabulary has less than 1e-20


class UniformModel:
    """Every id equally likely: ln(vocab_size) nats a token."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return torch.zeros(*tokens.shape, self.vocab_size)


class RandomModel:
    """Prefers random ids, by next to nothing."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return 1e-3 * torch.randn(*tokens.shape, self.vocab_size, generator=self.random)


class UnigramModel:
    """log p(id) whatever stands before."""

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.log_probs.expand(*tokens.shape, -1)


class BigramModel:
    """p(b | a) = (count(a, b) + p(b)) / (count(a) + 1);   p(b) = (count(b) + 1) / (n + V)."""

    def __init__(self, texts: Iterable[Sequence[int]], vocab_size: int) -> None:
        self.single: Counter[int] = Counter()
        self.double: Counter[tuple[int, int]] = Counter()
        self.before: Counter[int] = Counter()
        self.vocab_size = vocab_size
        for text in texts:
            self.single.update(text)
            self.double.update(zip(text, text[1:], strict=False))
            self.before.update(text[:-1])
        ids = torch.arange(vocab_size)
        unigram = torch.tensor([self.probability(None, int(b)) for b in ids], dtype=torch.float64)
        table = unigram.repeat(vocab_size, 1)
        for (a, b), count in self.double.items():
            table[a, b] += count
        total = torch.tensor([self.before[int(a)] + 1 for a in ids], dtype=torch.float64)
        self.table = (table / total[:, None]).log().float()

    def probability(self, a: int | None, b: int) -> float:
        """p(b | a), or p(b), from the counts alone: what the scores are checked against."""
        p = (self.single[b] + 1) / (self.single.total() + self.vocab_size)
        return p if a is None else (self.double[a, b] + p) / (self.before[a] + 1)

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.table[tokens]


class TextOracle:
    """Knows some texts: finds what it reads in them and is certain of what comes next."""

    def __init__(self, texts: Iterable[Sequence[int]], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.known = np.concatenate([np.array([*text, -1], dtype=np.int32) for text in texts])
        self._bytes = self.known.tobytes()

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        logits = torch.zeros(*tokens.shape, self.vocab_size)
        for row, ids in enumerate(tokens.numpy().astype(np.int32)):
            place, length = self._longest(ids)
            following = self.known[place + 1 : place + 1 + length]
            at = np.flatnonzero(following >= 0)
            logits[row, at, following[at].astype(np.int64)] = CERTAIN
        return logits

    def _longest(self, ids: np.ndarray) -> tuple[int, int]:
        """Where the longest known beginning of `ids` stands, and its length: padding follows."""
        place, low, high = 0, 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            found = self._find(ids[:middle].tobytes())
            if found < 0:
                high = middle - 1
            else:
                place, low = found, middle
        return place, low

    def _find(self, wanted: bytes) -> int:
        at = self._bytes.find(wanted)
        while at >= 0 and at % 4:
            at = self._bytes.find(wanted, at + 1)
        return at // 4 if at >= 0 else -1


class MqarOracle:
    """Answers every key with the value that the context gives it."""

    def __init__(self, task: MqarTask) -> None:
        self.task = task

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        logits = torch.zeros(*tokens.shape, self.task.vocab_size)
        context = 2 * self.task.pairs
        for row, ids in enumerate(tokens.tolist()):
            values = dict(zip(ids[0:context:2], ids[1:context:2], strict=True))
            for position in range(context, len(ids)):
                if ids[position] in values:
                    logits[row, position, values[ids[position]]] = CERTAIN
        return logits


class CopyOracle:
    """Repeats the data tokens in order where they are asked for."""

    def __init__(self, task: SelectiveCopyTask) -> None:
        self.task = task
        self.asking = (
            {SEPARATOR, BLANK} if task.variant == "adaptive-decay" else {task.vocab_size - 1}
        )

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        logits = torch.zeros(*tokens.shape, self.task.vocab_size)
        for row, ids in enumerate(tokens.tolist()):
            data = [i for i in ids if i in self.task.data_ids]
            places = [p for p, i in enumerate(ids) if i in self.asking]
            for position, value in zip(places, data, strict=False):
                logits[row, position, value] = CERTAIN
        return logits


class WordTokenizer(Tokenizer):
    """The closed vocabulary of a tokenised WikiText: its words, and <eos> for each end of line."""

    EOS = "<eos>"

    def __init__(self, train_text: str) -> None:
        words = [self.EOS, *dict.fromkeys(train_text.split())]
        self._words = words
        self._ids = {word: i for i, word in enumerate(words)}
        self.vocab_size = len(words)
        self.bos_id = self.eos_id = 0
        self.sha256 = hashlib.sha256("\n".join(words).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of the words, 0 for each line end. ValueError for a word outside the vocabulary."""
        ids = []
        for line in text.splitlines(keepends=True):
            for word in line.split():
                if word not in self._ids:
                    raise ValueError(
                        f"a word is not in the vocabulary: got {word!r}; expected those of the "
                        "training text alone; give the train file of the same corpus"
                    )
                ids.append(self._ids[word])
            ids += [0] * line.endswith("\n")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self._words[i] for i in ids).replace(self.EOS, "\n")
