"""Rows as training reads them: cut, mixed by weight, shuffled, damaged, fetched from elsewhere."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep import remote_dataset, shard_cache
from data_prep.bench import bench
from data_prep.remote_dataset import open_cache
from data_prep.shards import IGNORED_LABEL, Rows
from data_prep.training_rows import MixedRows, TrainingRows
from tests.packed_rows import publish_rows

ROW_TOKENS, SEQ_LEN = 32, 8
SHARD_ROWS = 5


def write_dataset(folder: Path, rows: int, seed: int = 0, shard_bytes: int = 600) -> Path:
    """Rows of random tokens in shards of about five rows."""
    rng = np.random.default_rng(seed)

    def numbered(i: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = rng.integers(0, 1000, ROW_TOKENS)
        tokens[0] = i
        return tokens, np.union1d([0], rng.integers(0, ROW_TOKENS, i % 4))

    return publish_rows(folder, map(numbered, range(rows)), ROW_TOKENS, shard_bytes)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "dataset", 40)


def shards_of(dataset: Path) -> list[Path]:
    return sorted((dataset / "train").glob("*.mds"))


def shard_of_row(dataset: Path) -> list[int]:
    entries = json.loads((dataset / "train" / "index.json").read_text())["shards"]
    return [n for n, entry in enumerate(entries) for _ in range(entry["samples"])]


def test_cut_rows_join_to_the_packed_ones(dataset: Path) -> None:
    packed = Rows(dataset, "train")
    rows = TrainingRows(dataset, "train", SEQ_LEN)
    assert len(rows) == 4 * len(packed)
    for i in range(len(packed)):
        pieces = [rows[4 * i + k] for k in range(4)]
        for name in ("tokens", "labels"):
            joined = np.concatenate([getattr(piece, name) for piece in pieces])
            np.testing.assert_array_equal(joined, getattr(packed[i], name))
        starts = np.concatenate([p.document_starts + SEQ_LEN * k for k, p in enumerate(pieces)])
        np.testing.assert_array_equal(starts, np.union1d(packed[i].document_starts, [0, 8, 16, 24]))
        assert all(piece.tokens.flags.writeable for piece in pieces)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide(
    dataset: Path, window: int | None
) -> None:
    rows = TrainingRows(dataset, "train", SEQ_LEN, shuffle_shards=window)
    orders = [rows.epoch_order(seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(len(rows)))
    assert len({tuple(order) for order in orders}) == 4
    again = TrainingRows(dataset, "train", SEQ_LEN, shuffle_shards=window)
    assert again.epoch_order(1, 1).tolist() == orders[3]


def test_a_window_touches_few_shards_at_once(dataset: Path) -> None:
    rows = TrainingRows(dataset, "train", SEQ_LEN, shuffle_shards=2)
    shard = np.array(shard_of_row(dataset))
    order = shard[rows.epoch_order(0, 0) // rows.pieces]
    last = {s: np.flatnonzero(order == s)[-1] for s in set(order)}
    first = {s: np.flatnonzero(order == s)[0] for s in set(order)}
    assert len(first) > 5
    for position in range(len(order)):
        assert sum(first[s] <= position <= last[s] for s in first) <= 2


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.01, 5.0)])
def test_mixed_rows_come_in_the_proportion_of_their_weights(
    tmp_path: Path, weights: tuple[float, float]
) -> None:
    a = TrainingRows(write_dataset(tmp_path / "a", 30), "train", SEQ_LEN)
    b = TrainingRows(write_dataset(tmp_path / "b", 6, seed=1), "train", SEQ_LEN, shuffle_shards=1)
    mixed = MixedRows([(a, weights[0]), (b, weights[1])])
    assert len(mixed) == len(a) + len(b) == 144
    used: Counter[int] = Counter()
    for epoch in range(40):
        order = mixed.epoch_order(5, epoch)
        assert len(order) == 144
        share = np.sum(order < len(a)) / 144
        assert abs(share - weights[0] / sum(weights)) < 1 / 144
        used.update(order.tolist())
    again = MixedRows([(a, weights[0]), (b, weights[1])])
    np.testing.assert_array_equal(again.epoch_order(5, 7), mixed.epoch_order(5, 7))
    assert mixed.epoch_order(5, 7) is mixed.epoch_order(5, 7)  # not made anew for every row
    assert len(mixed._orders) <= 3
    for part in (range(len(a)), range(len(a), len(mixed))):
        counts = [used[row] for row in part]
        assert max(counts) - min(counts) <= 1  # each row as often as its neighbours
    np.testing.assert_array_equal(mixed[3].tokens, a[3].tokens)
    np.testing.assert_array_equal(mixed[len(a) + 3].tokens, b[3].tokens)


def test_rows_of_unequal_length_do_not_mix(dataset: Path) -> None:
    a, b = (TrainingRows(dataset, "train", n) for n in (8, 16))
    with pytest.raises(ValueError, match=r"mixed rows differ in length: got seq_len \[8, 16\]"):
        MixedRows([(a, 1), (b, 1)])


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_shard_stops_or_is_skipped_as_set(dataset: Path, damage: str) -> None:
    good = TrainingRows(dataset, "train", SEQ_LEN)
    expected = [good[i].tokens for i in range(len(good))]
    path = shards_of(dataset)[2]
    bad = {i for i, shard in enumerate(shard_of_row(dataset)) if shard == 2}
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    if damage == "flip":
        path.write_bytes(content)
    stopping = TrainingRows(dataset, "train", SEQ_LEN)
    with pytest.raises(
        (ValueError, FileNotFoundError), match=rf"{path.name} is .*sha256 [0-9a-f]{{64}}"
    ):
        stopping[min(bad) * 4]
    told: list[str] = []
    rows = TrainingRows(dataset, "train", SEQ_LEN, damaged="skip", report=told.append)
    for i in range(len(rows)):
        row = rows[i]
        if i // 4 in bad:
            assert (row.labels == IGNORED_LABEL).all()
        else:
            np.testing.assert_array_equal(row.tokens, expected[i])
    assert len(told) == 1
    assert path.name in told[0]
    np.testing.assert_array_equal(rows.epoch_order(1, 1), good.epoch_order(1, 1))


def test_the_bench_reads_and_reports(dataset: Path) -> None:
    line = bench(dataset, "train", seq_len=8, threads=2, batch_rows=3, seconds=0.2)
    assert "M tokens/s at seq_len 8, 2 threads" in line
    with pytest.raises(ValueError, match="seq-len does not divide the rows"):
        bench(dataset, "train", seq_len=7, threads=1, batch_rows=1, seconds=0.1)
    shards_of(dataset)[1].unlink()
    with pytest.raises(ValueError, match="is missing"):
        bench(dataset, "train", seq_len=None, threads=1, batch_rows=1, seconds=0.1)


# --- a data set elsewhere -------------------------------------------------------------------------


def largest(dataset: Path) -> int:
    return max(path.stat().st_size for path in shards_of(dataset))


def test_a_remote_data_set_reads_as_a_local_one_within_its_limit(
    dataset: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    limit = 3 * largest(dataset)
    open_cache(f"file://{dataset}", cache, limit)
    local = TrainingRows(dataset, "train", SEQ_LEN)
    rows = TrainingRows(cache, "train", SEQ_LEN, shuffle_shards=2)
    most = 0
    for i in rows.epoch_order(0, 0):
        np.testing.assert_array_equal(rows[int(i)].tokens, local[int(i)].tokens)
        held = sum(path.stat().st_size for path in shards_of(cache))
        most = max(most, held)
    assert 0 < most <= limit
    assert len(shards_of(cache)) < len(shards_of(dataset))
    assert len(shards_of(dataset)) > 6
    assert all(path.exists() for path in shards_of(dataset))


def test_shards_are_fetched_once_per_window(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    open_cache(f"file://{dataset}", cache, 3 * largest(dataset))
    fetched: list[str] = []
    original = shard_cache.ShardCache._fetch

    def counted(self: shard_cache.ShardCache, path: Path, sha256: str, size: int) -> None:
        fetched.append(path.name)
        original(self, path, sha256, size)

    monkeypatch.setattr(shard_cache.ShardCache, "_fetch", counted)
    rows = TrainingRows(cache, "train", SEQ_LEN, shuffle_shards=2)
    for i in rows.epoch_order(0, 0):
        rows[int(i)]
    assert sorted(fetched) == [path.name for path in shards_of(dataset)]


def test_a_shard_that_another_process_removed_is_fetched_again(
    dataset: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    open_cache(f"file://{dataset}", cache, None)
    rows = TrainingRows(cache, "train", SEQ_LEN)
    expected = rows[0].tokens
    for path in shards_of(cache):
        path.unlink()
    np.testing.assert_array_equal(rows[0].tokens, expected)


def _read_everything(cache: Path, seed: int, done: Callable[[int], None]) -> None:
    rows = TrainingRows(cache, "train", SEQ_LEN, shuffle_shards=2)
    done(int(sum(rows[int(i)].tokens.sum() for i in rows.epoch_order(seed, 0))))


def test_processes_share_a_cache_that_is_too_small_for_both(dataset: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    open_cache(f"file://{dataset}", cache, 3 * largest(dataset))
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    readers = [
        context.Process(target=_read_everything, args=(cache, seed, results.put))
        for seed in (1, 2, 3)
    ]
    for reader in readers:
        reader.start()
    local = TrainingRows(dataset, "train", SEQ_LEN)
    total = sum(int(local[i].tokens.sum()) for i in range(len(local)))
    for reader in readers:
        reader.join(120)
        assert reader.exitcode == 0
    assert [results.get() for _ in readers] == [total] * 3
    assert sum(path.stat().st_size for path in shards_of(cache)) <= 3 * largest(dataset)


def test_a_damaged_or_missing_remote_shard_is_named(dataset: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    open_cache(f"file://{dataset}", cache, None)
    (cache / "train" / ".shard.00001.mds.1.tmp").write_bytes(b"of a killed fetch")
    first, second = shards_of(dataset)[:2]
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    second.unlink()
    rows = Rows(cache, "train")
    shard = shard_of_row(dataset)
    with pytest.raises(ValueError, match=rf"{first.name} is damaged: got sha256 .*expected sha256"):
        rows[0]
    with pytest.raises(FileNotFoundError, match=rf"{second.name} is missing: expected sha256"):
        rows[shard.index(1)]
    assert [path.name for path in (cache / "train").iterdir() if "mds" in path.name] == []


def test_folders_and_limits_that_do_not_fit_are_refused(dataset: Path, tmp_path: Path) -> None:
    cache, url = tmp_path / "cache", f"file://{dataset}"
    with pytest.raises(ValueError, match="holds a data set of its own"):
        open_cache(url, dataset, None)
    with pytest.raises(FileNotFoundError, match="is not a data set: got no manifest.json there"):
        open_cache(f"file://{tmp_path}", cache, None)
    with pytest.raises(ValueError, match="cache_bytes is too small: got 10; expected at least"):
        open_cache(url, cache, 10)
    open_cache(url, cache, 3 * largest(dataset))
    with pytest.raises(ValueError, match="is a cache of file://"):
        open_cache("file:///elsewhere", cache, None)
    with pytest.raises(ValueError, match="set data.shuffle_shards to at most 2"):
        TrainingRows(cache, "train", SEQ_LEN)
    with pytest.raises(ValueError, match="set data.shuffle_shards to at most 2"):
        TrainingRows(cache, "train", SEQ_LEN, shuffle_shards=3)
    shutil.rmtree(dataset)
    write_dataset(dataset, 12, seed=9)
    with pytest.raises(ValueError, match="has changed since"):
        open_cache(url, cache, None)
    for path in shards_of(dataset):
        assert path.exists()


def test_a_cache_that_was_killed_while_it_was_made_is_made_again(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(remote_dataset, "_fetch_small_files", killed)
        with pytest.raises(Killed):
            open_cache(f"file://{dataset}", cache, None)
    assert os.path.exists(cache / "cache.json")
    assert not (cache / "manifest.json").exists()
    open_cache(f"file://{dataset}", cache, None)
    assert len(Rows(cache, "train")) == 40
