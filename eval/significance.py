"""Is one model better than another on the same samples? Paired tests and intervals.

Both models answered the same samples, so their differences are tested, not their means: most of
the spread between samples then cancels.

    two outcomes (right or wrong)    McNemar's exact test: of the samples on which the models
                                     differ, are more won by one than a fair coin would give?
    numbers                          sign-flip permutation test of the mean difference; samples of
                                     one document or book flip together

p is two-sided. With many metrics and models compared, some p < 0.05 come by chance: the report says
how many tests it made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERMUTATIONS = 10_000
BOOTSTRAPS = 2_000


@dataclass(frozen=True)
class PairedTest:
    """The second model against the first."""

    difference: float
    """Mean of second - first over the samples."""
    low: float
    high: float
    """95 % bootstrap interval of the difference."""
    p: float
    samples: int
    method: str


def paired_test(
    first: Sequence[float], second: Sequence[float], clusters: Sequence[int] | None = None
) -> PairedTest:
    """Compares two models sample by sample; the same input gives the same result.

    Args:
        first, second: the values of the same samples, in the same order.
        clusters: which samples belong together (blocks of one document); None: none do.
    """
    difference = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    labels = np.arange(len(difference)) if clusters is None else np.asarray(clusters)
    _, cluster_of = np.unique(labels, return_inverse=True)
    sums = np.bincount(cluster_of, weights=difference)
    counts = np.bincount(cluster_of)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(sums), (BOOTSTRAPS, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    binary = clusters is None and {*first, *second} <= {0.0, 100.0}
    if binary:
        p = mcnemar(int((difference > 0).sum()), int((difference < 0).sum()))
    else:
        p = sign_flip(sums, rng)
    return PairedTest(
        difference=float(difference.mean()),
        low=float(low),
        high=float(high),
        p=p,
        samples=len(difference),
        method="McNemar" if binary else "sign flip",
    )


def mcnemar(won: int, lost: int) -> float:
    """Two-sided exact p of `won` and `lost` under equal chances; ties do not count."""
    n = won + lost
    tail = sum(math.comb(n, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flip(values: np.ndarray, rng: np.random.Generator) -> float:
    """Two-sided p of the sum of `values` under random signs."""
    observed = abs(values.sum())
    signs = rng.integers(0, 2, (PERMUTATIONS, len(values)), dtype=np.int8) * 2 - 1
    # Rounding shall not make the observed signs look rarer than they are.
    as_far = np.abs(signs @ values) >= observed * (1 - 1e-12)
    return float((as_far.sum() + 1) / (PERMUTATIONS + 1))
