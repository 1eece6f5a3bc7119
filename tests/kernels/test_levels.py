import pytest
import torch

from kernels.levels import (
    _carry_by_masks,
    _carry_by_rows,
    bit_length,
    carry,
    level,
    level_matrix,
    num_levels,
)


@pytest.mark.parametrize("T", [1, 2, 3, 5, 8, 33, 64, 65])
def test_levels_are_the_blocks_of_the_binary_counter(T):
    for t in range(T):
        blocks = {t: 0}  # token -> level, from the definition: one aligned block for each set bit
        for bit in range(t.bit_length()):
            if t >> bit & 1:
                start = (t >> (bit + 1)) << (bit + 1)
                blocks |= dict.fromkeys(range(start, start + 2**bit), bit + 1)
        assert blocks == {s: level(t, s) for s in range(t + 1)}


@pytest.mark.parametrize(("T", "L"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (16384, 15)])
def test_num_levels_is_the_largest_level_plus_one(T, L):
    assert num_levels(T) == L


def test_level_matrix_agrees_with_level():
    matrix = level_matrix(70)
    assert all(matrix[t, s] == level(t, s) for t in range(70) for s in range(t + 1))


def test_bit_length_is_exact_at_powers_of_two():
    values = [0, 1] + [2**i + d for i in range(1, 50) for d in (-1, 0, 1)]
    assert bit_length(torch.tensor(values)).tolist() == [v.bit_length() for v in values]


def test_carry_merges_like_a_counter_for_rows_at_different_positions():
    L = 5
    levels = torch.arange(1.0, L + 1).reshape(1, 1, L, 1, 1).repeat(4, 1, 1, 1, 1)
    carried = carry(levels, torch.tensor([0, 1, 6, 8]))[:, 0, :, 0, 0].tolist()
    assert carried == [[1, 2, 3, 4, 5], [0, 3, 3, 4, 5], [0, 0, 6, 4, 5], [0, 0, 0, 0, 15]]


@pytest.mark.parametrize("T", [0, -1])
def test_a_row_without_tokens_has_no_levels(T):
    with pytest.raises(ValueError, match="at least one token"):
        num_levels(T)


@pytest.mark.parametrize(("t", "s"), [(1, 2), (0, -1)])
def test_a_token_sees_no_later_one(t, s):
    with pytest.raises(ValueError, match="0 <= s <= t"):
        level(t, s)


def test_carry_by_masks_equals_carry_by_rows():
    torch.manual_seed(0)
    for positions in ([0, 1, 2, 3, 12, 16], [8, 8, 8], [0, 0], [31, 24, 24]):
        levels, t = torch.randn(len(positions), 2, 6, 3, 4), torch.tensor(positions)
        before = levels.clone()
        torch.testing.assert_close(_carry_by_rows(levels, t), _carry_by_masks(levels, t))
        assert torch.equal(levels, before)
