"""Ctrl-C while a program imports what takes seconds. Imports nothing that takes time itself."""

import os
import signal
import threading


def end_quietly_while_importing(module_name: str) -> bool:
    """Lets Ctrl-C end the process with 130 while imports that take seconds go on; else the
    KeyboardInterrupt would end one of them in a traceback.

    Returns:
        Whether it does: only for a program's own main module and where nobody else has decided
        what Ctrl-C does. `end_as_usual` then takes it back.
    """
    is_quiet = (
        module_name == "__main__"
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_quiet:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    return is_quiet


def end_as_usual() -> None:
    """Ctrl-C raises KeyboardInterrupt again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
