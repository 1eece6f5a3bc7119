from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.mqar import MqarTask, draw_block
from data_prep.shards import IGNORED_LABEL, Rows, read_tokenizer
from data_prep.synth import draw_rows, write_task


def block(task: MqarTask, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return draw_block(task, rows, np.random.default_rng(seed))


@pytest.mark.parametrize("random_non_queries", [True, False])
@pytest.mark.parametrize(("seq_len", "pairs"), [(8, 2), (16, 4), (64, 4), (64, 16)])
def test_each_key_is_asked_once_and_its_value_is_the_label(
    seq_len: int, pairs: int, random_non_queries: bool
) -> None:
    task = MqarTask(
        seq_len=seq_len, pairs=pairs, vocab_size=128, random_non_queries=random_non_queries
    )
    for tokens, labels in zip(*block(task, 200), strict=True):
        keys, values = tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert keys.min() >= 1
        assert keys.max() < 64
        assert values.min() >= 64
        assert values.max() < 128
        asked = np.flatnonzero(labels != IGNORED_LABEL)
        assert (asked >= 2 * pairs).all()
        assert ((asked - 2 * pairs) % 2 == 0).all()
        assert {tokens[p]: labels[p] for p in asked} == dict(zip(keys, values, strict=True))
        assert len(asked) == pairs
        blanks = np.setdiff1d(np.arange(2 * pairs, seq_len), asked)
        if not random_non_queries:
            assert (tokens[blanks] == 0).all()


def test_fillers_are_uniform_over_the_whole_vocabulary() -> None:
    task = MqarTask(seq_len=64, pairs=1, vocab_size=66)
    tokens, labels = block(task, 4000)
    fillers = tokens[:, 2:][labels[:, 2:] == IGNORED_LABEL]
    counts = np.bincount(fillers, minlength=66)
    expected = len(fillers) / 66
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_query_slots_follow_the_power_law() -> None:
    task = MqarTask(seq_len=34, pairs=1, vocab_size=64, power=0.5)
    _, labels = block(task, 40_000)
    slot = (np.argmax(labels != IGNORED_LABEL, axis=1) - 2) // 2
    weights = np.arange(1, 17) ** -0.5
    expected = 40_000 * weights / weights.sum()
    assert np.abs(np.bincount(slot, minlength=16) - expected).max() < 5 * np.sqrt(expected.max())


def test_keys_listed_early_are_asked_early() -> None:
    task = MqarTask(seq_len=64, pairs=4, vocab_size=128, random_non_queries=False)
    tokens, _ = block(task, 4000)
    places = [np.argmax(tokens[:, 8:] == tokens[:, 2 * i, None], axis=1).mean() for i in range(4)]
    assert places == sorted(places)


def test_rows_depend_on_seed_and_split_and_not_on_their_number() -> None:
    task = MqarTask(seq_len=16, pairs=2, vocab_size=64)
    many = [tokens for tokens, _ in draw_rows(task, 700, split="train", seed=5)]
    few = [tokens for tokens, _ in draw_rows(task, 600, split="train", seed=5)]
    assert len(many) == 700
    assert len(few) == 600
    assert np.array_equal(many[:600], few)
    for split, seed in (("validation", 5), ("train", 6)):
        assert not np.array_equal(few[0], next(draw_rows(task, 1, split=split, seed=seed))[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": 0}, "pairs is too small: got 0"),
        ({"seq_len": 15}, "seq-len does not fit 4 pairs: got 15"),
        ({"seq_len": 12}, r"expected an even number of at least 16 \(4 \* pairs\)"),
        ({"vocab_size": 64}, "vocab-size does not fit: got 64; expected an even number of at"),
        ({"vocab_size": 101}, "vocab-size does not fit: got 101"),
        ({"vocab_size": 1 << 21}, "and at most 1048576"),
        ({"power": 0.0}, "power is out of range: got 0.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, float], message: str) -> None:
    settings = {"seq_len": 64, "pairs": 4, "vocab_size": 128, **changes}
    with pytest.raises(ValueError, match=message):
        MqarTask(**settings)


def test_written_rows_are_the_drawn_rows(tmp_path: Path) -> None:
    task = MqarTask(seq_len=16, pairs=2, vocab_size=64)
    manifest, made = write_task(task, tmp_path / "m", rows=20, validation_rows=5, seed=1)
    assert made
    assert manifest.kind == "mqar"
    assert manifest.documents_in == 25
    rows = Rows(tmp_path / "m", "validation")
    drawn = list(draw_rows(task, 5, split="validation", seed=1))
    assert len(rows) == 5
    for i, (tokens, labels) in enumerate(drawn):
        assert np.array_equal(rows[i].tokens, tokens)
        assert np.array_equal(rows[i].labels, labels)
        assert rows[i].document_starts.tolist() == [0]
        assert rows[i].labels.dtype == np.int64
    with pytest.raises(ValueError, match="has no tokenizer"):
        read_tokenizer(tmp_path / "m")
    again, made = write_task(task, tmp_path / "m", rows=20, validation_rows=5, seed=1)
    assert again == manifest
    assert not made
    with pytest.raises(ValueError, match="other settings: rows there is 20, asked for 30"):
        write_task(task, tmp_path / "m", rows=30, validation_rows=5, seed=1)
    with pytest.raises(ValueError, match="rows do not fit: got 0"):
        write_task(task, tmp_path / "n", rows=0, validation_rows=5, seed=1)


def test_query_slots_of_the_published_setting_follow_its_power_law() -> None:
    """S = (256 - 2N) / 2 slots, p_j ~ j^-0.99, the first of N draws without replacement."""
    task = MqarTask(seq_len=256, pairs=4)
    tokens, labels = block(task, 4000, seed=7)
    first_key = tokens[:, 0]
    slots = np.arange(1, 125)
    weights = slots**-0.99
    expected = 4000 * weights / weights.sum()
    asked = np.argmax((tokens == first_key[:, None]) & (labels == tokens[:, 1, None]), axis=1)
    counts = np.bincount((asked - 8) // 2, minlength=124)
    # Pooled so that every bin expects some: 1, 2, 3-4, 5-8, ...
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 124]
    for low, high in zip(edges, edges[1:], strict=False):
        wanted = expected[low:high].sum()
        assert abs(counts[low:high].sum() - wanted) < 5 * np.sqrt(wanted)


def test_keys_and_values_are_uniform_over_their_halves() -> None:
    tokens, _ = block(MqarTask(seq_len=64, pairs=8, vocab_size=128), 4000)
    for column, low, high in ((0, 1, 64), (1, 64, 128)):
        counts = np.bincount(tokens[:, column:16:2].ravel(), minlength=128)
        assert counts[:low].sum() == counts[high:].sum() == 0
        expected = 32_000 / (high - low)
        assert np.abs(counts[low:high] - expected).max() < 6 * np.sqrt(expected)


@pytest.mark.parametrize(("seq_len", "pairs"), [(16, 4), (64, 8), (256, 32)])
def test_adaptive_decay_asks_at_fixed_places_in_random_order(seq_len: int, pairs: int) -> None:
    task = MqarTask(seq_len=seq_len, pairs=pairs, vocab_size=128, variant="adaptive-decay")
    tokens, labels = block(task, 300)
    places = np.arange(seq_len - 2 * pairs, seq_len, 2)
    assert all((np.flatnonzero(row != IGNORED_LABEL) == places).all() for row in labels)
    assert tokens.min() >= 1
    assert tokens.max() < 128
    orders = set()
    for row, answers in zip(tokens, labels, strict=True):
        keys, values = row[: 2 * pairs : 2].tolist(), row[1 : 2 * pairs : 2].tolist()
        asked = row[places].tolist()
        assert dict(zip(asked, answers[places], strict=True)) == dict(
            zip(keys, values, strict=True)
        )
        orders.add(tuple(keys.index(key) for key in asked))
    assert len(orders) > 20
    fillers = np.delete(tokens[:, 2 * pairs :], places - 2 * pairs, axis=1)
    expected = fillers.size / 127
    counts = np.bincount(fillers.ravel(), minlength=128)[1:]
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_variants_have_their_own_rules() -> None:
    MqarTask(seq_len=256, pairs=32, vocab_size=128, variant="adaptive-decay")
    with pytest.raises(ValueError, match="more than seq-len"):
        MqarTask(seq_len=256, pairs=32, vocab_size=128)
    with pytest.raises(ValueError, match="act on variant zoology only"):
        MqarTask(seq_len=64, pairs=4, vocab_size=128, variant="adaptive-decay", power=1.0)
    with pytest.raises(ValueError, match="unknown variant of MQAR: got s4"):
        MqarTask(seq_len=64, pairs=4, vocab_size=128, variant="s4")
