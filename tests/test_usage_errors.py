"""A command that was typed wrongly gets one line, whichever of our command lines it is."""

import runpy
import sys

import pytest

MISTAKES = {
    "pretrain": "Missing command",
    "pretrain CONFIG --bogus": "No such option: --bogus",
    "pretrain train": "Missing argument 'config'",
    "pretrain CONFIG --dry-run --ranks many": "Invalid value for '--ranks'",
    "pretrain compare RUN": "Missing argument 'run_b'",
    "pretrain bench CONFIG --rounds 0": "Invalid value for '--rounds'",
    "pretrain sweep": "Missing argument 'config'",
    "eval": "Missing command",
    "eval RUN": "Missing option '--tasks'",
    "eval RUN --tasks niah --samples few": "Invalid value for '--samples'",
    "eval compare": "Missing argument 'checkpoints'",
    "eval selftest --bogus": "No such option: --bogus",
    "data_prep": "Missing command",
    "data_prep pack": "Missing option '--tokenizer'",
    "data_prep inspect SET --samples -1": "Invalid value for '--samples'",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_usage_error_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    module, *arguments = typed.split()
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delitem(sys.modules, f"{module}.__main__", raising=False)
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(module, run_name="__main__")
    assert stop.value.code == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"error: {MISTAKES[typed]}")
    assert line.endswith("; see --help")
    assert said.out == ""
