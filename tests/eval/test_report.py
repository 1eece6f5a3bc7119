import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eval import report
from eval.report import (
    check_writable,
    default_output,
    describe,
    earlier_results,
    run_of,
    write_results,
    write_scalars,
)
from eval.result import Result
from models.checkpoint_directory import file_sha256, step_folder, write_manifest
from models.tensor_files import INDEX_NAME, open_tensors, save_tensors


def result(metric="accuracy", value=1.0, **settings):
    return Result(
        task="niah",
        version=1,
        metric=metric,
        value=value,
        unit="percent",
        count=3,
        standard_error=None,
        settings=settings,
    )


MODEL = {"path": "m", "step": 5, "weights_sha256": "aa", "tokenizer_sha256": None}


def test_later_results_replace_equal_measurements_and_keep_the_rest(tmp_path):
    output = tmp_path / "new" / "results.json"
    write_results(output, MODEL, [result(length=256), result(length=512)])
    write_results(output, MODEL, [result(value=2.0, length=512), result("gain")])
    content = json.loads(output.read_text())
    got = [(r["metric"], r["settings"].get("length"), r["value"]) for r in content["results"]]
    assert got == [("accuracy", 256, 1.0), ("accuracy", 512, 2.0), ("gain", None, 1.0)]
    assert content["model"] == MODEL


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format_version": 1}', "\x00"])
def test_other_files_are_never_overwritten(tmp_path, content):
    output = tmp_path / "results.json"
    output.write_text(content)
    with pytest.raises(ValueError, match="holds no results"):
        earlier_results(output, MODEL)
    assert output.read_text() == content


def test_results_of_other_weights_are_refused(tmp_path):
    output = tmp_path / "results.json"
    write_results(output, MODEL, [result()])
    with pytest.raises(ValueError, match="another model: got weights aa"):
        earlier_results(output, {**MODEL, "weights_sha256": "bb"})


def test_results_of_a_run_go_under_the_run(tmp_path, model_dir):
    step_dir = step_folder(tmp_path, 100)
    step_dir.mkdir(parents=True)
    for path in model_dir.iterdir():
        if path.is_file():
            (step_dir / path.name).write_bytes(path.read_bytes())
    write_manifest(step_dir, {"step": 100})
    assert run_of(step_dir) == tmp_path
    assert default_output(step_dir) == tmp_path / "eval" / "step-00000100" / "results.json"
    assert describe(step_dir)["step"] == 100
    assert run_of(model_dir) is None
    assert default_output(model_dir) == model_dir / "eval" / "results.json"
    assert describe(model_dir)["step"] is None


def test_scalars_are_read_back_from_the_runs_tensorboard(tmp_path):
    write_scalars(tmp_path, 7, [result(value=12.5, length=256), result(value=25.0, length=512)])
    events = EventAccumulator(str(tmp_path / "tensorboard" / "eval")).Reload()
    got = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {tag: (e.step, e.value) for tag, e in got.items()} == {
        "eval/niah/accuracy/length_256": (7, 12.5),
        "eval/niah/accuracy/length_512": (7, 25.0),
    }


@pytest.fixture
def sharded(model_dir, tmp_path):
    """The model of `model_dir` in several shards."""
    folder = tmp_path / "sharded"
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("eval", "*.safetensors"))
    save_tensors(folder, open_tensors(model_dir), max_shard_bytes=20_000)
    return folder


def test_weights_of_one_file_are_named_by_its_hash(model_dir):
    assert describe(model_dir)["weights_sha256"] == file_sha256(model_dir / "model.safetensors")


def test_weights_of_shards_are_named_by_all_of_them_and_nothing_else(sharded):
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    before = describe(sharded)["weights_sha256"]
    listing = "".join(f"{file_sha256(path)}  {path.name}\n" for path in shards)
    assert before == hashlib.sha256(listing.encode()).hexdigest()
    (sharded / "model-00009-of-00009.safetensors").write_bytes(b"of another save")
    assert describe(sharded)["weights_sha256"] == before
    seen = {before}
    for path in shards:
        path.write_bytes(path.read_bytes() + b"x")
        seen.add(describe(sharded)["weights_sha256"])
    assert len(seen) == 1 + len(shards)


@pytest.mark.parametrize("in_shards", [False, True])
def test_hashes_of_a_checkpoint_are_taken_from_its_manifest(
    model_dir, sharded, tmp_path, monkeypatch, in_shards
):
    step_dir = step_folder(tmp_path, 4)
    source = sharded if in_shards else model_dir
    shutil.copytree(source, step_dir, ignore=shutil.ignore_patterns("eval"))
    expected = describe(source)
    write_manifest(step_dir, {"step": 4})
    monkeypatch.setattr(report, "file_sha256", None)  # called, it would raise
    assert (step_dir / INDEX_NAME).is_file() == in_shards
    assert describe(step_dir) == {**expected, "path": str(step_dir), "step": 4}


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_names_the_file_and_leaves_what_was_there(tmp_path, monkeypatch):
    output = tmp_path / "results.json"
    write_results(output, MODEL, [result()])
    before = output.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match=f"^cannot write {output}: No space left on device$"):
        write_results(output, MODEL, [result(value=2.0)])
    assert output.read_bytes() == before
    assert list(tmp_path.iterdir()) == [output]


def test_curves_are_in_the_order_of_steps_and_hold_each_once(tmp_path):
    for step, value in ((12, 1.0), (5, 2.0), (12, 3.0), (9, 4.0)):
        write_scalars(tmp_path, step, [result(value=value, length=256)])
    folder = tmp_path / "tensorboard" / "eval"
    (file,) = folder.iterdir()
    with open(file, "ab") as events:
        events.write(b"half a record")  # of a killed evaluation
    write_scalars(tmp_path, 1, [result(value=0.0, length=256)])
    events = EventAccumulator(str(folder)).Reload()
    (tag,) = events.Tags()["scalars"]
    points = [(point.step, point.value) for point in events.Scalars(tag)]
    assert points == [(1, 0.0), (5, 2.0), (9, 4.0), (12, 3.0)]


def test_scalars_that_cannot_be_written_name_their_folder(tmp_path):
    (tmp_path / "tensorboard").write_text("mine")
    with pytest.raises(OSError, match=f"^cannot write {tmp_path}/tensorboard/eval: "):
        write_scalars(tmp_path, 1, [result()])


def test_place_that_cannot_be_written_is_refused_and_nothing_made(tmp_path, monkeypatch):
    check_writable(tmp_path / "new" / "deep")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=f"cannot write in .*: {tmp_path}/file is not a folder"):
        check_writable(tmp_path / "file" / "deep")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match=f"no permission to write in {tmp_path}$"):
        check_writable(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_output_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"not a file: got {tmp_path}"):
        earlier_results(tmp_path, MODEL)


def test_two_programs_that_write_at_once_lose_nothing(tmp_path):
    output = tmp_path / "results.json"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from eval.report import write_results; from eval.result import Result\n"
        "for i in range(40):\n"
        "    r = Result(task=sys.argv[3], version=1, metric=str(i), value=1.0, unit='', count=1,\n"
        "               standard_error=None)\n"
        "    write_results(Path(sys.argv[2]), {'weights_sha256': 'aa'}, [r])\n"
    )
    root = str(Path(report.__file__).parent.parent)
    writers = [
        subprocess.Popen([sys.executable, "-c", code, root, str(output), task]) for task in "ab"
    ]
    assert [writer.wait(timeout=240) for writer in writers] == [0, 0]
    assert len(json.loads(output.read_text())["results"]) == 80
