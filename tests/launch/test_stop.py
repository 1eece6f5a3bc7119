import os
import signal
import time

import pytest

from launch.stop import StopRequest


def test_the_first_signal_asks_the_workers_and_the_second_ends(tmp_path, capsys):
    stop = StopRequest(tmp_path / "stop", 100.0)
    before = signal.getsignal(signal.SIGTERM)
    with stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert not stop.expired
        assert (tmp_path / "stop").exists()
        assert "up to 100 s for a checkpoint" in capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
    assert not (tmp_path / "stop").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_waiting_ends(tmp_path):
    with StopRequest(tmp_path / "stop", 0.0) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert stop.expired
        failure = stop.failure("after a checkpoint")
    assert failure.code == 130
    assert "stopped by SIGINT after a checkpoint; start the same command again" in str(failure)


def test_without_a_run_folder_there_is_nothing_to_wait_for(tmp_path):
    with StopRequest(tmp_path / "no run yet" / "stop", 100.0) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert stop.expired
