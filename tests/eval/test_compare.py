import json
import shutil

import pytest

from eval.compare import model_names, shared_rows, write
from eval.evaluation import checked_units, evaluate, targets
from eval.result import Options
from models.tensor_files import as_lazy, open_tensors, save_tensors


def entry(value, metric="accuracy", version=2, unit="percent", **settings):
    return {
        "task": "niah",
        "version": version,
        "metric": metric,
        "value": value,
        "unit": unit,
        "count": 3,
        "standard_error": None,
        "settings": settings,
    }


@pytest.fixture(scope="module")
def other_model_dir(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("others") / "scaled"
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("eval"))
    weights = {name: t.load() * 1.5 for name, t in open_tensors(model_dir).items()}
    save_tensors(folder, as_lazy(weights))
    return folder


@pytest.fixture
def found(model_dir, other_model_dir, tmp_path, source_folder):
    """Two models, scored."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for source, folder in zip((model_dir, other_model_dir), folders, strict=True):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("eval"))
    found = targets(folders, None, all_checkpoints=False)
    options = Options(
        texts=(source_folder / "types.txt", source_folder / "heapq.txt"),
        lengths=(600,),
        answer_tokens=4,
        samples=4,
    )
    evaluate(
        checked_units(found, ["perplexity", "niah", "loss-by-position"], options, device="cpu")
    )
    return found


def test_equal_measurements_share_a_row_and_others_do_not():
    first = [entry(1.0, length=8), entry(2.0, length=16), entry(5.0, version=1, length=8)]
    second = [entry(3.0, length=8), entry(4.0, length=8, seed=1), entry(6.0, "gain", length=16)]
    rows = shared_rows([first, second])
    assert [[None if v is None else v[0] for v in row.values] for row in rows] == [
        [1.0, 3.0], [2.0, None], [5.0, None], [None, 4.0], [None, 6.0],
    ]  # fmt: skip


def test_models_are_named_by_what_tells_them_apart(found):
    assert model_names(found) == ["first", "second"]


def test_report_has_table_tests_and_plots(found, tmp_path):
    path = write(found, tmp_path / "report")
    text = path.read_text()
    assert "| metric | unit | first | second |" in text
    assert "## Paired tests against first" in text
    for name in ("McNemar", "sign flip", "retrieval_gain", "nll_per_token"):
        assert name in text
    plots = sorted(p.name for p in path.parent.glob("*.png"))
    assert plots == ["accuracy-niah-2.png", "loss-by-position-600.png"]
    for name in plots:
        assert f"({name})" in text
        assert (path.parent / name).read_bytes().startswith(b"\x89PNG")
    assert write(found, tmp_path / "report").read_text() == text


def test_tasks_can_be_chosen(found, tmp_path):
    text = write(found, tmp_path / "report", ["perplexity"]).read_text()
    assert "perplexity (version" in text
    assert "niah" not in text


def test_versions_never_mix(found, tmp_path):
    output = found[1].output
    content = json.loads(output.read_text())
    for result in content["results"]:
        result["version"] += 1
    output.write_text(json.dumps(content))
    for line in write(found, tmp_path / "report").read_text().splitlines():
        if line.startswith("| accuracy"):
            assert line.count(" - |") == 1


def test_samples_of_other_weights_are_not_tested(found, tmp_path):
    for path in (found[1].output.parent / "samples").iterdir():
        header, *rest = path.read_text().splitlines()
        facts = {**json.loads(header), "weights_sha256": "of another model"}
        path.write_text("\n".join([json.dumps(facts), *rest]) + "\n")
    assert "Paired tests" not in write(found, tmp_path / "report").read_text()


def test_nothing_to_compare_is_refused(found, model_dir, tmp_path):
    with pytest.raises(ValueError, match="nothing to compare: got 1 model"):
        write(found[:1], tmp_path / "report")
    with pytest.raises(ValueError, match="no results to compare: .*--tasks wikitext first"):
        write(found, tmp_path / "report", ["wikitext"])
    assert not (tmp_path / "report").exists()
