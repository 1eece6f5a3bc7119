import pytest

from launch.first_error import FirstError

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "x.py", line 1, in <module>',
    "    1 / 0",
    "ZeroDivisionError: division by zero",
]


def fed(lines):
    first = FirstError()
    shown = [line for line in lines if first.feed(line)]
    return first, shown


def test_error_lines_are_kept_for_the_end():
    first, shown = fed(["step 1", "error: bad", "error: worse", "step 2"])
    assert first.message == "bad\nworse"
    assert shown == ["step 1", "step 2"]


@pytest.mark.parametrize("before", ["", "[rank3]: "])
def test_of_a_traceback_the_user_sees_the_last_line(before):
    first, shown = fed([before + line for line in [*TRACEBACK, "", "after"]])
    assert first.message == "ZeroDivisionError: division by zero"
    assert shown == [before + line for line in [TRACEBACK[-1], "", "after"]]


def test_the_first_of_two_exceptions_is_the_cause():
    first, _ = fed([*TRACEBACK, "", *TRACEBACK[:-1], "ValueError: that was not caught well"])
    assert first.message == "ZeroDivisionError: division by zero"


def test_errors_go_before_exceptions_and_silence_is_empty():
    assert fed([*TRACEBACK, "error: why"])[0].message == "why"
    assert fed(["all is well"])[0].message == ""
