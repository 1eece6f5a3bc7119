import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eval.report import (
    default_output,
    describe,
    earlier_results,
    run_of,
    write_results,
    write_scalars,
)
from eval.result import Result
from models.checkpoint_directory import step_folder, write_manifest


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
    write_results(output, MODEL, [], [result(length=256), result(length=512)])
    earlier = earlier_results(output, MODEL)
    write_results(output, MODEL, earlier, [result(value=2.0, length=512), result("gain")])
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
    write_results(output, MODEL, [], [result()])
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
