import os
import signal
import subprocess
import sys
import time

import pytest

from launch import stop as stop_module
from launch.stop import StopRequest


@pytest.fixture
def stop():
    stop = StopRequest(100.0)
    yield stop
    stop.restore()


def test_while_ranks_run_the_first_signal_is_theirs_and_the_second_ends(stop, capsys, monkeypatch):
    monkeypatch.setattr(stop_module, "SAME_SECONDS", 0.0)
    stop.graceful = True
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested
    assert not stop.expired
    assert not stop.ending
    assert "up to 100 s for a checkpoint" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert stop.ending


def test_what_signals_child_and_group_asks_once(stop):
    """As `timeout` does."""
    stop.graceful = True
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    assert stop.requested
    assert not stop.ending


def test_a_closed_terminal_asks_once_and_ranks_hear_of_it_as_sigterm(stop, monkeypatch):
    monkeypatch.setattr(stop_module, "SAME_SECONDS", 0.0)
    stop.graceful = True
    for _ in range(2):  # the shell passes on what the terminal has already told its jobs
        signal.raise_signal(signal.SIGHUP)
    assert stop.for_ranks == signal.SIGTERM
    assert stop.failure("at once").code == 128 + signal.SIGHUP
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_under_nohup_a_closed_terminal_changes_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest(1.0)
        signal.raise_signal(signal.SIGHUP)
        stop.restore()
        assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_without_ranks_it_ends_at_once_and_once(stop, number):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    signal.raise_signal(number)  # cleaning up is not disturbed
    failure = stop.failure("at once")
    assert failure.code == 128 + number
    assert f"stopped by {number.name} at once; start the same command again" in str(failure)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_is_raised_where_python_cannot_raise_comes_again(monkeypatch, number):
    ended = []
    monkeypatch.setattr(stop_module, "CLEAN_UP_SECONDS", 1.0)
    monkeypatch.setattr(stop_module, "_end_hard", ended.append)
    stop = StopRequest(100.0)

    class Ends:
        def __del__(self):
            signal.raise_signal(number)

    def end_one_and_wait():
        Ends()
        time.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        end_one_and_wait()
    assert stop.ending
    stop.restore()
    time.sleep(1.5)
    assert not ended  # neither by the first nor by the second


def test_waiting_ends():
    stop = StopRequest(0.0)
    try:
        stop.graceful = True
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert stop.expired
    finally:
        stop.restore()


def test_afterwards_signals_do_what_they_did():
    before = signal.getsignal(signal.SIGTERM)
    StopRequest(1.0).restore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_has_ended_in_time_is_not_ended_again(monkeypatch):
    ended = []
    monkeypatch.setattr(stop_module, "CLEAN_UP_SECONDS", 0.2)
    monkeypatch.setattr(stop_module, "_end_hard", ended.append)
    stop = StopRequest(1.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    stop.restore()
    time.sleep(0.5)
    assert not ended


# The main thread is in C code that no Python handler interrupts, as Ray's may be; so is a child.
STUCK = """
import ctypes, os, signal, subprocess, sys, threading
from launch import stop
stop.CLEAN_UP_SECONDS = 1.0
stop.StopRequest(100.0)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid, flush=True)
mutex, lock = ctypes.create_string_buffer(128), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
lock(mutex)
"""


def test_a_launcher_that_is_stuck_ends_all_the_same():
    stuck = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    child = int(stuck.stdout.readline())
    try:
        assert stuck.wait(60) == 143
    finally:
        stuck.kill()
    for _ in range(300):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("its child lives")
