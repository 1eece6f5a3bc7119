"""`python -m launch.rank PARENT CPUS MODULE [ARGUMENT ...]` becomes `python -m MODULE [...]`.

Before it does, it makes sure that the kernel ends it together with the thread of the node agent
that started it, however that ends, binds it to processors and gives signals their usual meaning.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
ANY_CPU = "any"


def main(arguments: list[str]) -> None:
    """Does not return."""
    parent, cpus, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it ended before the line above
            sys.exit(1)
        if cpus != ANY_CPU:
            os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    # Ray's workers block or ignore some, which is inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, "-m", *command])


if __name__ == "__main__":
    main(sys.argv[1:])
