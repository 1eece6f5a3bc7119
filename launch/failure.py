"""Why a start of the ranks ended before the run was complete, in one line."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from launch.node_agent import Ended

USER_ERROR = 2
RUN_TIME_FAILURE = 1
STOPPED_BY_SIGNAL = 128
"""Exit codes from here on: pretrain saved a checkpoint and ended, as it was asked to."""

_LOST_PEER = re.compile(
    "closed by peer|reset by peer|broken pipe|connection was|gloo|nccl|process ?group|"
    "distnetworkerror|distbackenderror|tcpstore|socket timeout",
    re.IGNORECASE,
)
LOST_PEER = 4
"""Place of such an end among the causes, the best of which is 0."""
_PASSING = re.compile(r"0x[0-9a-f]+|\d+")
"""What differs between two times of one error: addresses, process ids, ports, times."""


@dataclass(frozen=True)
class Failure:
    """How a start of the ranks ended.

    message: for the user.
    code: exit code of the launch, if this is its end.
    step: the last one in the run's log.
    outside: whether it came from outside the program (a kill, a lost node) and may not come again.
    """

    message: str
    code: int
    step: int
    outside: bool

    @property
    def is_final(self) -> bool:
        """Whether the ranks ended because somebody, or the clock, asked them to."""
        return self.code >= STOPPED_BY_SIGNAL

    def repeats(self, other: Failure | None) -> bool:
        """Whether the same error came at the same step, so it would come again and again."""
        if other is None or self.outside or other.outside or self.step != other.step:
            return False
        return _PASSING.sub("", self.message) == _PASSING.sub("", other.message)


def cause(ended: Sequence[Ended], names: Sequence[str], step: int) -> Failure:
    """The failure that ranks which ended badly tell of.

    Several ranks fail when one does: the others lose their peer. First comes what pretrain says
    itself, then a killed process, then an exception, then what a lost peer leads to.

    Args:
        ended: in the order in which it became known, at least one with a code other than 0.
        names: of the node of every rank.
    """
    worst = min((end for end in ended if end.code), key=_rank_of_cause)
    where = f"rank {worst.rank} on node {names[worst.rank]}"
    if worst.code >= STOPPED_BY_SIGNAL:
        name = signal.Signals(worst.code - 128).name
        message = worst.message or f"training stopped as it was asked to (exit code of {name})"
        return Failure(message, worst.code, step, outside=True)
    if worst.code == USER_ERROR and worst.message:
        return Failure(worst.message, USER_ERROR, step, outside=False)
    if worst.code < 0 and not worst.message:
        name = signal.Signals(-worst.code).name
        outside = -worst.code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        why = " (from outside, or out of memory)" if outside else ""
        message = f"{where} was killed by {name}{why}"
        return Failure(message, RUN_TIME_FAILURE, step, outside)
    code = USER_ERROR if worst.code == USER_ERROR else RUN_TIME_FAILURE
    said = worst.message or f"ended with exit code {worst.code}"
    return Failure(f"{where}: {said}", code, step, outside=bool(_LOST_PEER.search(said)))


def is_cause(end: Ended) -> bool:
    """Whether a bad end tells why by itself, and not only that another rank is gone."""
    return _rank_of_cause(end) < LOST_PEER


def _rank_of_cause(end: Ended) -> int:
    if end.message and _LOST_PEER.search(end.message):
        return LOST_PEER
    if end.code >= STOPPED_BY_SIGNAL:
        return 0
    if end.message:
        return 1 if end.code in (RUN_TIME_FAILURE, USER_ERROR) else 2
    if end.code < 0:
        return 3 if end.code == -signal.SIGABRT else 1
    return 5
