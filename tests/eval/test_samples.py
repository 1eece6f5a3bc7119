import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval import samples
from eval.samples import SampleStore, read_samples

STORE = {"weights_sha256": "aa", "tokenizer_sha256": "tt"}


def asked_for(log, keys):
    """The values, and the places that had to be scored."""
    places = []

    def run(missing):
        for place in missing:
            places.append(place)
            yield {"score": place / 7}

    return log.scored(keys, run, "samples"), places


def test_finished_samples_are_not_run_again(tmp_path):
    store = SampleStore(tmp_path, **STORE)
    log = store.open("niah", 2, {"length": 8})
    first, places = asked_for(log, ["a", "b"])
    assert places == [0, 1]
    log.close()
    log = store.open("niah", 2, {"length": 8})
    again, places = asked_for(log, ["b", "c", "a"])
    assert places == [1]
    assert [again[2], again[0]] == first
    log.close()
    ((header, done),) = read_samples(tmp_path)
    assert header["settings"] == {"length": 8}
    assert set(done) == {"a", "b", "c"}


def test_what_was_scored_before_a_failure_is_kept(tmp_path):
    store = SampleStore(tmp_path, **STORE)
    log = store.open("niah", 2, {})

    def fails(missing):
        yield {"score": 1.0}
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        log.scored(["a", "b"], fails, "samples")
    log.close()
    assert asked_for(store.open("niah", 2, {}), ["a", "b"])[1] == [1]


def test_a_cut_last_line_is_dropped_and_the_file_goes_on(tmp_path):
    store = SampleStore(tmp_path, **STORE)
    log = store.open("niah", 2, {})
    asked_for(log, ["a", "b"])
    log.close()
    (path,) = (tmp_path / "samples").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    log = store.open("niah", 2, {})
    assert asked_for(log, ["a", "b"])[1] == [1]
    log.close()
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"version": 3},
        {"settings": {"length": 9}},
        {"tokenizer_sha256": "other"},
        {"weights_sha256": "other"},
    ],
)
def test_other_measurements_share_nothing(tmp_path, other):
    facts = {"version": 2, "settings": {"length": 8}, **STORE}

    def opened(version, settings, **store):
        return SampleStore(tmp_path, **store).open("niah", version, settings)

    log = opened(**facts)
    asked_for(log, ["a"])
    log.close()
    log = opened(**{**facts, **other})
    assert asked_for(log, ["a"])[1] == [0]
    log.close()
    files = list((tmp_path / "samples").iterdir())
    assert len(files) == (1 if "weights_sha256" in other else 2)


def test_a_damaged_file_is_started_anew(tmp_path):
    store = SampleStore(tmp_path, **STORE)
    store.open("niah", 2, {}).close()
    (path,) = (tmp_path / "samples").iterdir()
    path.write_text("no json\n")
    log = store.open("niah", 2, {})
    assert asked_for(log, ["a"])[1] == [0]
    log.close()
    assert json.loads(path.read_text().splitlines()[0])["task"] == "niah"


def test_two_programs_cannot_write_one_file(tmp_path):
    log = SampleStore(tmp_path, **STORE).open("niah", 2, {})
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from eval.samples import SampleStore\n"
        "SampleStore(Path(sys.argv[2]), 'aa', 'tt').open('niah', 2, {})\n"
    )
    root = str(Path(samples.__file__).parent.parent)
    other = subprocess.run(
        [sys.executable, "-c", code, root, str(tmp_path)], capture_output=True, text=True
    )
    log.close()
    assert "samples are being written by another program" in other.stderr


def test_without_a_folder_nothing_is_written():
    log = SampleStore().open("niah", 2, {})
    assert asked_for(log, ["a"])[1] == [0]
    assert asked_for(log, ["a"])[1] == []
    log.close()
