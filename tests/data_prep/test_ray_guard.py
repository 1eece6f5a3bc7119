"""What ends a private Ray whose command was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

if sys.platform != "linux":
    pytest.skip("sessions are looked up in /proc", allow_module_level=True)

# Starts a session whose leader ends and leaves a child behind, has it watched, and sleeps.
COMMAND = """
import subprocess, sys, time
from pathlib import Path
from data_prep.ray_guard import Guard
leader = subprocess.Popen(
    ["sh", "-c", "sleep 1000 & echo $!"],
    stdout=subprocess.PIPE, text=True, start_new_session=True,
)
guard = Guard(Path(sys.argv[1]))
guard.watch(leader.pid)
print(int(leader.stdout.readline()), guard._process.pid, flush=True)
leader.wait()
input()
guard.close()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_it_ends_sessions_and_removes_the_folder_when_the_command_ends(
    tmp_path: Path, killed: bool
) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert command.stdin is not None
    assert command.stdout is not None
    left, guard = map(psutil.Process, map(int, command.stdout.readline().split()))
    try:
        assert folder.is_dir()
        if killed:
            os.killpg(command.pid, signal.SIGKILL)
            command.wait()
        else:
            command.stdin.write("\n")
            command.stdin.close()
            assert command.wait(60) == 0
        _, alive = psutil.wait_procs([left, guard], timeout=60)
        assert not alive
        assert not folder.exists()
        assert other.poll() is None
    finally:
        other.kill()
        command.kill()
        command.wait()
        other.wait()
