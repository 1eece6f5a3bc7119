import pytest

from launch.failure import Failure, cause, is_cause
from launch.node_agent import Ended

NAMES = ["a", "a", "b", "b"]
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.3]:63"


@pytest.mark.parametrize(
    ("ended", "message", "code", "outside"),
    [
        ([Ended(0, 2, "bad setting"), Ended(1, 2, "")], "bad setting", 2, False),
        ([Ended(1, 2, ""), Ended(0, 2, "bad setting")], "bad setting", 2, False),
        ([Ended(0, 1, PEER), Ended(3, 1, "disk full")], "rank 3 on node b: disk full", 1, False),
        ([Ended(0, 1, PEER), Ended(2, -9, "")], "rank 2 on node b was killed by SIGKILL", 1, True),
        ([Ended(0, -6, ""), Ended(2, -11, "")], "rank 2 on node b was killed by SIGSEGV", 1, False),
        ([Ended(0, 0, ""), Ended(1, 3, "")], "rank 1 on node a: ended with exit code 3", 1, False),
        ([Ended(0, 1, PEER), Ended(1, 1, PEER)], "Connection closed by peer", 1, True),
        (
            [Ended(1, 142, ""), Ended(0, 142, "")],
            "as it was asked to (exit code of SIGALRM)",
            142,
            True,
        ),
        ([Ended(1, 1, "KeyError: 'x'"), Ended(0, 1, PEER)], "rank 1 on node a: KeyError", 1, False),
    ],
)
def test_the_cause_is_told_from_what_it_leads_to(ended, message, code, outside):
    found = cause(ended, NAMES, step=7)
    assert message in found.message
    assert "\n" not in found.message
    assert (found.code, found.outside, found.step) == (code, outside, 7)


def test_only_a_lost_peer_leaves_the_cause_open():
    assert is_cause(Ended(0, -9, ""))
    assert is_cause(Ended(0, 1, "ValueError: x"))
    assert not is_cause(Ended(0, 1, PEER))
    assert not is_cause(Ended(0, 1, ""))


def failure(message="rank 1: ValueError: at 0x7f01 in pid 12", step=3, outside=False):
    return Failure(message, 1, step, outside)


def test_the_same_error_at_the_same_step_would_come_again():
    assert failure().repeats(failure("rank 1: ValueError: at 0x7fff in pid 345"))
    assert not failure().repeats(None)
    assert not failure(step=4).repeats(failure())
    assert not failure("rank 1: KeyError").repeats(failure())
    assert not failure(outside=True).repeats(failure(outside=True))
