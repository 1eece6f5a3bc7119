"""What is said to nobody."""

import os
import sys

import pytest

from launch.say import complain, tell


@pytest.mark.parametrize(("say", "name"), [(tell, "stdout"), (complain, "stderr")])
def test_a_reader_who_is_gone_ends_nothing(monkeypatch, say, name):
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, name, stream)
        say("heard")
        assert os.read(reader, 100) == b"heard\n"
        os.close(reader)
        say("not heard")
        with pytest.raises(BrokenPipeError):
            print("not heard", file=stream, flush=True)
        with open(os.devnull, "w") as nowhere:  # what is left must not fail at the stream's end
            os.dup2(nowhere.fileno(), writer)
