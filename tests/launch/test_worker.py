import io
import pickle
import sys

import pytest

from launch.worker import Listener, TrainingStopped, run_pretrain


@pytest.fixture
def fake_pretrain(tmp_path, monkeypatch):
    """A module `pretrain` of our own in front of the real one."""

    def make(source):
        package = tmp_path / "pretrain"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "__main__.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [n for n in sys.modules if n == "pretrain" or n.startswith("pretrain.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "argv", ["before"])
        monkeypatch.chdir(tmp_path)
        return {"working_directory": str(tmp_path), "argv": ["c.yaml", "seed=3"]}

    return make


def test_runs_pretrain_as_a_command(fake_pretrain, tmp_path):
    job = fake_pretrain(
        "import os, sys\n"
        "assert __name__ == '__main__'\n"
        "open('seen', 'w').write(f'{sys.argv[1:]} {os.getcwd()}')\n"
    )
    run_pretrain(job)
    assert (tmp_path / "seen").read_text() == f"['c.yaml', 'seed=3'] {tmp_path}"


def test_exit_code_0_is_an_ordinary_end(fake_pretrain):
    run_pretrain(fake_pretrain("raise SystemExit(0)"))


def test_exit_code_and_error_lines_come_back(fake_pretrain, capsys):
    job = fake_pretrain(
        "import sys\nprint('noise', file=sys.stderr)\n"
        "print('error: first', file=sys.stderr)\nprint('error: second', file=sys.stderr)\n"
        "sys.exit(2)"
    )
    with pytest.raises(TrainingStopped) as stop:
        run_pretrain(job)
    assert (stop.value.code, stop.value.message) == (2, "first\nsecond")
    assert "noise\nerror: first\n" in capsys.readouterr().err


def test_other_errors_pass_through_and_streams_are_restored(fake_pretrain):
    before = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError):
        run_pretrain(fake_pretrain("1 / 0"))
    assert (sys.stdout, sys.stderr) == before


def test_lines_of_other_ranks_are_labelled():
    stream = io.StringIO()
    listener = Listener(stream, "rank 3: ")
    print("a\nb", file=listener)
    assert stream.getvalue() == "rank 3: a\nrank 3: b\n"


def test_missing_working_directory_is_explained():
    with pytest.raises(TrainingStopped, match="shared file system") as stop:
        run_pretrain({"working_directory": "/nowhere", "argv": []})
    assert stop.value.code == 2


def test_training_stopped_survives_pickling():
    copy = pickle.loads(pickle.dumps(TrainingStopped(2, "why")))
    assert (copy.code, copy.message) == (2, "why")
