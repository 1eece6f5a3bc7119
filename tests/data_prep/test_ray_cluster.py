"""What surrounds Ray: data_prep.ray_cluster."""

from __future__ import annotations

import os
import sys

import pytest
import ray

from data_prep.ray_cluster import connected


def test_what_ray_prints_while_it_shuts_down_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its C++ threads report the tasks that the shutdown itself ended."""
    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "shutdown", lambda: os.write(2, b"Failed to push error to driver\n"))
    with connected(None, cpus=1, env={}):
        print("inside", file=sys.stderr)
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "inside\nafter\n"
    assert "RAY_GCS_SERVER_PORT" not in os.environ  # of another Ray that is started from here
