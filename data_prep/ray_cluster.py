"""Ray as every command of ours uses it: a private one on this machine, or a running one by address.

A private Ray listens on loopback only, asks for a token made for this process, writes its files to
a folder of its own and ends with the command, whatever ends that. A cluster given by address is
never stopped; its machines must see the same files under the same paths.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.ray_guard import Guard

ROOT = Path(__file__).resolve().parent.parent
CONNECT_TIMEOUT_SECONDS = 5.0
# Results are files; the store holds what tasks share. Ray's default takes 30 % of memory.
OBJECT_STORE_BYTES = 128 << 20
START_ATTEMPTS = 5
PORT_CLASH = "used by other components"
FOLDER_PARENT = Path("/tmp")  # short: Ray puts sockets in it, whose paths may have 107 characters
FOLDER_PREFIX = "fenwick-ray-"


@contextmanager
def connected(
    address: str | None, *, cpus: int, env: Mapping[str, str], log_to_driver: bool = True
) -> Iterator[Path | None]:
    """Inside, Ray is connected. Yields the private Ray's folder, or None in a running cluster.

    Args:
        address: HOST:PORT of a running cluster or "auto"; None starts a private one.
        cpus: CPUs that a private one offers to tasks.
        env: environment of every worker, beside the repository's PYTHONPATH.

    Raises:
        ValueError: nothing answers at `address`.
    """
    if address is not None:
        _check_answers(address)
    set_environment(private=address is None)
    import ray  # after the environment: Ray reads it when it is imported
    from ray._private import utils

    env = {"PYTHONPATH": os.environ["PYTHONPATH"], **env}
    settings: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": log_to_driver}
    folder: Path | None = None
    guard: Guard | None = None
    try:
        with _sigterm_stays():
            if address is None:
                remove_stale_folders()
                prefix = f"{FOLDER_PREFIX}{os.getpid()}-"
                folder = Path(tempfile.mkdtemp(prefix=prefix, dir=FOLDER_PARENT))
                guard = Guard(folder) if utils.detect_fate_sharing_support() else None
                with _sessions_of_their_own(guard):
                    _start_private(folder, cpus, env, settings)
            else:
                _join(address, env, settings)
        yield folder
    finally:
        with _silent_stderr():
            ray.shutdown()
        if guard is not None:
            guard.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drops what Ray's C++ threads print while it shuts down: tasks that it ends itself are errors
    to it, which it then fails to report ("Failed to push error to driver")."""
    if sys.stderr is None:  # closed by the caller: nothing can appear
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)


@contextmanager
def _sigterm_stays() -> Iterator[None]:
    """Ray sets handlers of its own while it starts; ours stays.

    The one in Python exits in the midst of the start, so it is never set; the one in C++ prints a
    stack and is replaced when Ray has started.
    """
    from ray._private import utils

    setter, handler = utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    utils.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = setter
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _sessions_of_their_own(guard: Guard | None) -> Iterator[None]:
    """What Ray starts leaves our process group, and the terminal's session.

    A signal for the whole group (a batch system's SIGTERM, a closed terminal's SIGHUP) would end
    Ray before what runs in it can save. The kernel ends Ray's processes with us all the same,
    whatever ends us, and the guard what they started; where the kernel cannot, there is no guard,
    and Ray itself needs the group for that.
    """
    from ray._private import services

    if guard is None:
        yield
        return
    names = vars(services)
    plain = names["ConsolePopen"]

    def start(*arguments: Any, **settings: Any) -> Any:
        process = plain(*arguments, **settings, start_new_session=True)
        guard.watch(process.pid)
        return process

    names["ConsolePopen"] = start
    try:
        yield
    finally:
        names["ConsolePopen"] = plain


def _join(address: str, env: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    """Connects to a running cluster. ValueError where that is not possible."""
    import ray

    try:
        ray.init(address=address, runtime_env={"env_vars": dict(env)}, **settings)
    except (ConnectionError, ValueError) as error:
        raise ValueError(_no_cluster(str(error), address)) from None
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise
        facts = " ".join(str(error).split())
        raise ValueError(
            f"Ray or Python differs from the cluster's: got {facts}; expected the same versions; "
            "install them here or there"
        ) from None


def set_environment(private: bool) -> None:
    """What Ray reads from the environment, here and in every process that it starts.

    What makes it private is read when it is imported, so it is set only before that.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DEDUP_LOGS"] = "0"
    os.environ["RAY_COLOR_PREFIX"] = "0"
    # Workers without GPUs get CUDA_VISIBLE_DEVICES from us, not from Ray.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])
    if not private:
        # `ray start` asks for the token that it finds; clients send theirs only if told to.
        if _has_token():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        return
    os.environ.pop("RAY_ADDRESS", None)
    if "ray" in sys.modules:
        return
    # The one switch that keeps a node on 127.0.0.1: Ray replaces an explicit 127.0.0.1 by the
    # machine's address and then listens on all interfaces.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # A token for this process alone, in no file: other users of the machine cannot connect.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _has_token() -> bool:
    """Whether this user has a token for clusters, where Ray looks for one."""
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return True
    return (Path.home() / ".ray" / "auth_token").is_file()


def remove_stale_folders() -> None:
    """Removes what commands left behind that were killed so hard that they could not."""
    for folder in FOLDER_PARENT.glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).split("-")[0]
        if folder.is_dir() and folder.stat().st_uid == os.getuid() and pid.isdecimal():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
            except PermissionError:
                pass  # alive, and another user's: the number is in use again


def _start_private(
    folder: Path, cpus: int, env: Mapping[str, str], settings: Mapping[str, Any]
) -> None:
    """Starts Ray on this machine, with `env` and its own address in every worker's environment."""
    import ray

    for attempt in range(START_ATTEMPTS):
        # Parts of Ray look for "the" cluster of this machine and would meet another one.
        port = _free_port()
        os.environ["RAY_GCS_SERVER_PORT"] = str(port)
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
                runtime_env={"env_vars": {**env, "RAY_ADDRESS": f"127.0.0.1:{port}"}},
                **settings,
            )
            return
        except ValueError as error:
            # Ray draws free ports at random and refuses its own draw when two parts got one port.
            if PORT_CLASH not in str(error) or attempt + 1 == START_ATTEMPTS:
                raise
            ray.shutdown()
        finally:
            os.environ.pop("RAY_GCS_SERVER_PORT")  # a Ray that is started from here has its own


def _check_answers(address: str) -> None:
    """A wrong address is refused in seconds; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"--address is no address: got {address}; expected HOST:PORT of a Ray head, or auto"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise ValueError(_no_cluster(error.strerror or str(error), address)) from None


def _no_cluster(found: str, address: str) -> str:
    return (
        f"no Ray cluster answers: got {' '.join(found.split())} at {address}; expected a running "
        "Ray head; start one with `ray start --head`"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
