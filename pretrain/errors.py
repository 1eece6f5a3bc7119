"""The ways in which a run ends without being complete and without being a bug."""

import signal


class Refused(ValueError):
    """Something the user has to change, found before any training; raised on every rank at once."""


class TrainingFailed(RuntimeError):
    """Training cannot go on, for a reason that one line explains.

    Args:
        message: the line.
        on_all_ranks: every rank raises this at once, so one of them is enough to tell it.
    """

    def __init__(self, message: str, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


class Stopped(BaseException):
    """A signal asked a sweep to end. Not an Exception: nothing on the way may take it for one.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
