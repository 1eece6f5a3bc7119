import numpy as np
import pytest

from eval.significance import mcnemar, paired_test


def test_mcnemar_is_the_exact_binomial():
    assert mcnemar(0, 0) == 1
    assert mcnemar(5, 5) == 1
    assert mcnemar(1, 9) == mcnemar(9, 1) == pytest.approx(2 * 11 / 1024)
    assert mcnemar(0, 10) == pytest.approx(2 / 1024)


def test_equal_models_do_not_differ():
    values = list(np.random.default_rng(0).normal(size=50))
    result = paired_test(values, values)
    assert (result.difference, result.low, result.high) == (0, 0, 0)
    assert result.p == 1


def test_a_small_steady_difference_is_seen_through_a_large_common_spread():
    rng = np.random.default_rng(1)
    first = 10 * rng.normal(size=200)
    second = first + 0.1 + 0.3 * rng.normal(size=200)
    result = paired_test(first, second)
    assert result.method == "sign flip"
    assert result.p < 0.001
    assert result.low < 0.1 < result.high
    assert result.low > 0
    assert paired_test(second, first).difference == pytest.approx(-result.difference)


def test_right_and_wrong_are_tested_by_mcnemar():
    first, second = [0.0] * 30 + [100.0] * 10, [100.0] * 20 + [0.0] * 10 + [100.0] * 10
    result = paired_test(first, second)
    assert result.method == "McNemar"
    assert result.difference == 50
    assert result.p == pytest.approx(2 / 2**20)


def test_false_alarms_are_as_rare_as_p_says():
    rng = np.random.default_rng(2)
    ps = [paired_test(*rng.normal(size=(2, 30))).p for _ in range(200)]
    assert 1 <= sum(p < 0.05 for p in ps) <= 25


def test_blocks_of_one_book_count_as_one():
    """Ten books of 20 blocks that differ by book: without clusters the difference looks certain."""
    rng = np.random.default_rng(3)
    book = rng.normal(0.3, 1.0, size=10)
    second = np.repeat(book, 20)
    first = np.zeros(200)
    clusters = np.repeat(np.arange(10), 20)
    apart, together = paired_test(first, second), paired_test(first, second, clusters)
    assert together.difference == pytest.approx(apart.difference)
    assert together.p > 3 * apart.p
    assert together.high - together.low > 2 * (apart.high - apart.low)
