"""Which documents are written, and how often: duplicates out, sources and lengths weighed.

Decided from the units' tables alone, in corpus order, so that neither workers nor interruptions
can change it. Memory: 3 bytes a document, one pass of content hashes (PASS_BYTES), and 32 bytes a
document where sources or lengths are weighed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.near_duplicates import Seen
from data_prep.recipe import PackRequest
from data_prep.unit_files import NAMED_EXAMPLES, TRAIN, Reasons, UnitTable

PASS_BYTES = 512 << 20
BYTES_A_HASH = 64  # hash, position and the sort's own arrays
MOST_COPIES = 60_000
DUPLICATE = "duplicate"
NEAR_DUPLICATE = "near duplicate"
WEIGHED_OUT = "left out by weight"


@dataclass(frozen=True)
class SourceShare:
    """What of a training source is used."""

    documents: int  # distinct ones that are used
    tokens: int  # with repeats
    rate: float  # how often a document of length weight 1 is used


@dataclass(frozen=True)
class Selection:
    """copies[u][d]: how often document d of unit u is written; 0: not at all."""

    copies: list[np.ndarray]
    shares: list[SourceShare]


def select(
    tables: Sequence[UnitTable], sources: Sequence[int], request: PackRequest, reasons: Reasons
) -> Selection:
    """The selection; each document that it leaves out is counted in `reasons`.

    sources: number of each table's source in the request.
    """
    sizes = [len(table.column("splits")) for table in tables]
    dropped = [np.zeros(size, bool) for size in sizes]
    if not request.keep_duplicates:
        _find_duplicates(tables, sizes, dropped)
        _count(tables, dropped, DUPLICATE, reasons)
    if request.near_duplicates is not None:
        near = _near_duplicates(tables, dropped, request.near_duplicates)
        _count(tables, near, NEAR_DUPLICATE, reasons)
        for out, more in zip(dropped, near, strict=True):
            out |= more
    copies = [(~out).astype(np.uint16) for out in dropped]
    shares = _weigh(tables, sources, copies, request)
    weighed_out = [(c == 0) & ~out for c, out in zip(copies, dropped, strict=True)]
    _count(tables, weighed_out, WEIGHED_OUT, reasons)
    return Selection(copies, shares)


def _find_duplicates(
    tables: Sequence[UnitTable], sizes: Sequence[int], dropped: Sequence[np.ndarray]
) -> None:
    """Marks each document whose content came before, in the training sources or in validation."""
    passes = 1 + sum(sizes) * BYTES_A_HASH // PASS_BYTES
    starts = np.cumsum([0, *sizes])
    for number in range(passes):
        hashes, positions = [], []
        for table, start in zip(tables, starts, strict=False):
            digests = table.column("digests")
            mine = np.flatnonzero(digests[:, 0] % np.uint64(passes) == number)
            hashes.append(digests[mine])
            positions.append(mine + start)
        if not hashes:
            return
        digests, places = np.concatenate(hashes), np.concatenate(positions)
        order = np.lexsort((places, digests[:, 1], digests[:, 0]))
        again = np.all(digests[order[1:]] == digests[order[:-1]], axis=1)
        for place in np.sort(places[order[1:][again]]):
            unit = int(np.searchsorted(starts, place, side="right")) - 1
            dropped[unit][place - starts[unit]] = True


def _near_duplicates(
    tables: Sequence[UnitTable], dropped: Sequence[np.ndarray], threshold: float
) -> list[np.ndarray]:
    seen = Seen(threshold)
    found = []
    for table, out in zip(tables, dropped, strict=True):
        near = np.zeros(len(out), bool)
        signatures = table.column("signatures")
        for document in np.flatnonzero(~out):
            near[document] = not seen.is_new(signatures[document])
        found.append(near)
    return found


def _count(
    tables: Sequence[UnitTable], chosen: Sequence[np.ndarray], reason: str, reasons: Reasons
) -> None:
    named = 0
    for table, mask in zip(tables, chosen, strict=True):
        documents = np.flatnonzero(mask)
        if not len(documents):
            continue
        names = table.record()["names"] if named < NAMED_EXAMPLES else []
        examples = [names[d] for d in documents[: NAMED_EXAMPLES - named]] if names else []
        named += len(examples)
        reasons.merge({reason: len(documents)}, {reason: examples})


@dataclass(frozen=True)
class _Weighable:
    """The training documents of one table that may be used."""

    unit: int
    documents: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray  # by length
    coins: np.ndarray  # in [0, 1)

    def copies(self, rate: float) -> np.ndarray:
        return np.floor(rate * self.weights + self.coins).clip(max=MOST_COPIES)


def _weigh(
    tables: Sequence[UnitTable],
    sources: Sequence[int],
    copies: Sequence[np.ndarray],
    request: PackRequest,
) -> list[SourceShare]:
    """Sets the copies of training documents; each source gets its share of the tokens.

    A document is used floor(rate * length weight + coin) times, coin in [0, 1) fixed by its name
    and the seed. The rate of the source that runs out first is its `repeat`; the others' are the
    ones that give their share.
    """
    training = [n for n, source in enumerate(request.sources) if source.split == "train"]
    weights = {n: request.sources[n].weight for n in training}
    weighed = any(weight is not None for weight in weights.values())
    if not weighed and not request.length_weights:
        return _unweighed_shares(tables, sources, copies, training)
    by_source: list[list[_Weighable]] = [[] for _ in request.sources]
    for unit, table in enumerate(tables):
        by_source[sources[unit]].append(_weighable(unit, table, copies[unit], request))
    rates = {n: 1.0 for n in training}
    if weighed:
        capacity = {n: _tokens(by_source[n], request.sources[n].repeat) for n in training}
        for n in training:
            if capacity[n] == 0:
                raise ValueError(
                    f"source {request.sources[n].name} has no training document left to weigh: "
                    "expected some; leave it out or loosen the filters"
                )
        scale = min(capacity[n] / (weights[n] or 1) for n in training)
        for n in training:
            target = scale * (weights[n] or 1)
            rates[n] = _rate_for(by_source[n], target, float(request.sources[n].repeat))
    shares = []
    for n in training:
        tokens = documents = 0
        for part in by_source[n]:
            used = part.copies(rates[n])
            copies[part.unit][part.documents] = used
            tokens += int((used * part.lengths).sum())
            documents += int((used > 0).sum())
        shares.append(SourceShare(documents, tokens, rates[n]))
    return shares


def _unweighed_shares(
    tables: Sequence[UnitTable],
    sources: Sequence[int],
    copies: Sequence[np.ndarray],
    training: Sequence[int],
) -> list[SourceShare]:
    documents, tokens = Counter[int](), Counter[int]()
    for table, source, used in zip(tables, sources, copies, strict=True):
        mine = (used > 0) & (table.column("splits") == TRAIN)
        documents[source] += int(mine.sum())
        tokens[source] += int(table.column("lengths")[mine].sum())
    return [SourceShare(documents[n], tokens[n], 1.0) for n in training]


def _weighable(unit: int, table: UnitTable, copies: np.ndarray, request: PackRequest) -> _Weighable:
    documents = np.flatnonzero((table.column("splits") == TRAIN) & (copies > 0))
    lengths = table.column("lengths")[documents]
    weights = np.ones(len(documents))
    for tokens, weight in sorted(request.length_weights):
        weights[lengths >= tokens] = weight
    coins = (table.column("coins")[documents] >> np.uint64(11)) / 2.0**53  # below 1, exactly
    return _Weighable(unit, documents, lengths, weights, coins)


def _tokens(parts: Sequence[_Weighable], rate: float) -> int:
    return int(sum((part.copies(rate) * part.lengths).sum() for part in parts))


def _rate_for(parts: Sequence[_Weighable], target: float, most: float) -> float:
    """The smallest rate up to `most` that gives at least `target` tokens, to a document or so."""
    low, high = 0.0, most
    if _tokens(parts, high) <= target:
        return high
    for _ in range(50):
        middle = (low + high) / 2
        if _tokens(parts, middle) < target:
            low = middle
        else:
            high = middle
    return high
