"""Shards: what is written is read back, and no more than one of them is in memory."""

import gc
import json
import stat
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import tensor_files
from models.tensor_files import INDEX_NAME, LazyTensor, as_lazy, open_tensors, save_tensors

TENSORS = {f"t{i}": torch.randn(10, 10 + i).to(torch.bfloat16 if i % 2 else None) for i in range(6)}


@pytest.mark.parametrize("limit", [1, 600, 1000, 10**9])
def test_shards_hold_what_was_saved_in_files_below_the_limit(limit: int, tmp_path: Path) -> None:
    save_tensors(tmp_path, as_lazy(TENSORS), limit)
    read = open_tensors(tmp_path)
    assert {name: t.shape for name, t in read.items()} == {n: t.shape for n, t in TENSORS.items()}
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].load(), tensor)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (limit == 10**9) == (not (tmp_path / INDEX_NAME).exists())
    if len(files) > 1:
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        index = json.loads((tmp_path / INDEX_NAME).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in read.values())
        for file in files:
            inside = [n for n, where in index["weight_map"].items() if where == file.name]
            assert len(inside) == 1 or sum(read[n].nbytes for n in inside) <= limit


def test_saving_again_in_another_layout_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    for limit in (600, 10**9, 600):
        save_tensors(tmp_path, as_lazy(TENSORS), limit)
        single = limit == 10**9
        assert (tmp_path / "model.safetensors").exists() == single
        assert (tmp_path / INDEX_NAME).exists() != single
        assert torch.equal(open_tensors(tmp_path)["t3"].load(), TENSORS["t3"])


def test_one_shard_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: dict[int, int] = {}
    most = 0

    def counted(tensor: LazyTensor) -> LazyTensor:
        def load() -> Tensor:
            nonlocal most
            value = tensor.load()
            alive[id(value)] = value.nbytes
            weakref.finalize(value, alive.pop, id(value))
            most = max(most, sum(alive.values()))
            return value

        return LazyTensor(tensor.shape, tensor.dtype, load)

    save_tensors(tmp_path, {name: counted(t) for name, t in as_lazy(_fresh(40)).items()}, 2000)
    gc.collect()
    assert not alive
    assert 1000 <= most <= 2000  # of 16,000 bytes in all


def test_one_file_is_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tensors(tmp_path, as_lazy(_fresh(12)), 1000)
    opened: list[weakref.ref[object]] = []

    class Handle:
        def __init__(self, file: object) -> None:
            self.file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    real = tensor_files.safe_open

    def counted(*args: object, **kwargs: object) -> Handle:
        assert not [ref for ref in opened if ref() is not None], "another shard is still open"
        handle = Handle(real(*args, **kwargs))
        opened.append(weakref.ref(handle))
        return handle

    monkeypatch.setattr(tensor_files, "safe_open", counted)
    for tensor in open_tensors(tmp_path).values():
        tensor.load()
    assert len(opened) > 3


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    save_tensors(tmp_path, as_lazy(TENSORS))
    loaded = open_tensors(tmp_path)["t0"].load()
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(loaded, TENSORS["t0"])


def test_files_are_as_readable_as_any_new_file(tmp_path: Path) -> None:
    save_tensors(tmp_path, as_lazy(TENSORS))
    (tmp_path / "other").write_text("")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_damage_is_named(tmp_path: Path) -> None:
    save_tensors(tmp_path, as_lazy(TENSORS), 600)
    index = tmp_path / INDEX_NAME
    content = index.read_text()
    shard = tmp_path / "model-00002-of-00006.safetensors"
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00006.safetensors do not exist"):
        open_tensors(tmp_path)
    shard.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="model-00002-of-00006.safetensors is damaged"):
        open_tensors(tmp_path)
    shard.write_bytes(whole)
    index.write_text(content.replace('"t4"', '"t9"'))
    with pytest.raises(ValueError, match="does not fit its shards: t4 is in only one"):
        open_tensors(tmp_path)
    index.write_text(content.replace("model-00002", "../model-00002"))
    with pytest.raises(ValueError, match="names a file outside its folder"):
        open_tensors(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="is not an index of shards"):
        open_tensors(tmp_path)


def test_a_limit_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_bytes must be >= 1: got 0"):
        save_tensors(tmp_path, as_lazy(TENSORS), 0)


def _fresh(count: int) -> dict[str, Tensor]:
    return {f"t{i}": torch.randn(10, 10) for i in range(count)}
