"""Before anything starts: is every node fit for the run, and do they reach each other?

What is missing is refused with one line that names the node.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.ray_cluster import ROOT
from launch import probe as probe_module
from launch.cluster import Request
from launch.environment import passed_on
from launch.errors import NodeRefused
from launch.node_agent import News, Order
from launch.nodes import Node, Nodes, names_of
from models.accounting import parameter_count
from pretrain.config import LOGS_FOLDER, RunConfig

LIBRARIES = ("ray", "torch", "deepspeed", "mosaicml-streaming", "numpy", "pydantic", "safetensors")
MODULES = (
    *("ray", "torch", "deepspeed", "streaming", "numpy", "pydantic", "safetensors", "yaml"),
    *("typer", "rich", "tensorboard", "matplotlib", "fsspec", "zstandard"),
)
PROBE_SECONDS = 60.0
CONNECT_SECONDS = 5.0
ALL_REDUCE_SECONDS = 90.0
ALL_REDUCE_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}
STATE_BYTES = 12
"""Of a parameter in a checkpoint: fp32 weights and two moments."""
SPARE_BYTES = 64 << 20

Tell = Callable[[str], None]
Facts = Mapping[str, Any]


class Preflight:
    """The checks of one launch; the same ones for nodes that come back later.

    Args:
        config: the run.
        request: what is asked for.
        tell: prints a line.
    """

    def __init__(self, config: RunConfig, request: Request, tell: Tell) -> None:
        self._config = config
        self._request = request
        self._tell = tell
        self._logs = config.run_dir.resolve() / LOGS_FOLDER
        self._expected: dict[str, Any] = {}

    def check_nodes(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Asks every node for what it has.

        Raises:
            NodeRefused: one lacks something.
        """
        names = [names_of(rows)[row["NodeID"]] for row in rows]
        with self._question() as question:
            found = _ask_all([row["NodeID"] for row in rows], names, question)
            for name, facts in zip(names, found, strict=True):
                self._check(name, facts, question)
        versions = {k: v for k, v in found[0]["versions"].items() if v is not None}
        self._tell(
            f"{len(rows)} {'nodes' if len(rows) > 1 else 'node'}: Python {found[0]['python']}, "
            + ", ".join(f"{name} {version}" for name, version in versions.items())
        )

    def check_node(self, nodes: Nodes, node: Node) -> None:
        """The same for a node that came back, through its agent. Raises NodeRefused."""
        with self._question() as question:
            self._check(node.name, nodes.call(node, "probe", question), question)

    @contextmanager
    def _question(self) -> Any:
        """A question for the nodes, with a token in the run folder that they must see."""
        self._logs.mkdir(parents=True, exist_ok=True)
        token = self._logs / f".launch-{uuid.uuid4().hex}"
        token.write_text(token.name)
        data = self._config.data
        local = [(data.dataset, data.remote), *((o.dataset, o.remote) for o in data.mixed_with)]
        yield {
            "root": str(ROOT),
            "libraries": LIBRARIES,
            "modules": MODULES,
            "working_directory": os.getcwd(),
            "tokens": {str(token): token.name},
            "answers": str(self._logs),
            "manifests": [str(p.resolve() / "manifest.json") for p, remote in local if not remote],
            "disk": str(self._config.run_dir.resolve()),
        }
        token.unlink(missing_ok=True)

    def _check(self, name: str, facts: Facts, question: Mapping[str, Any]) -> None:
        """Holds a node against the first one. Raises NodeRefused."""

        def refuse(problem: str) -> None:
            raise NodeRefused(name, problem)

        same = {"Python": facts["python"], **facts["versions"]}
        expected = self._expected.setdefault("versions", (name, same))
        for library, version in same.items():
            if version != expected[1][library]:
                refuse(
                    f"has another version of {library}: got {version}; expected "
                    f"{expected[1][library]} as on node {expected[0]}; install the same everywhere"
                )
        if facts["missing"]:
            refuse(
                f"module is missing: got no {facts['missing'][0]}; expected what pyproject.toml "
                "lists; install it in the environment that Ray was started from"
            )
        for what, path in (("repository", ROOT), ("working_directory", os.getcwd())):
            if not facts[what]:
                refuse(
                    f"{what.replace('_', ' ')} is not there: got nothing at {path}; expected the "
                    "same path on every node; share it or copy it"
                )
        run_dir = self._config.run_dir.resolve()
        if facts["unseen"]:
            refuse(
                f"run folder is not shared: got no sight there of what was written here in "
                f"{run_dir}; expected a shared file system; choose a run_dir on one"
            )
        if facts["answer_error"]:
            refuse(
                f"run folder cannot be written: got {facts['answer_error']} in {run_dir}; expected "
                "a folder that every node may write to"
            )
        answer = Path(facts["answer"])
        if not answer.is_file():
            refuse(
                f"run folder is not shared: got no sight here of what was written there in "
                f"{run_dir}; expected a shared file system; choose a run_dir on one"
            )
        answer.unlink(missing_ok=True)
        manifests = self._expected.setdefault("manifests", (name, facts["manifests"]))
        for path, digest in facts["manifests"].items():
            if digest is None:
                refuse(
                    f"data set is not there: got no {path}; expected the data set on every node; "
                    "share its folder or copy it there"
                )
            if digest != manifests[1][path]:
                refuse(
                    f"has another data set: got a different {path}; expected that of node "
                    f"{manifests[0]}; share the folder or copy it again"
                )
        needed = STATE_BYTES * parameter_count(self._config.model) + SPARE_BYTES
        for place, free, least in (
            (str(run_dir), facts["free_bytes"], needed),
            ("its folder for temporary files", facts["temporary_free_bytes"], SPARE_BYTES),
        ):
            if free < least:
                refuse(
                    f"disk is too full: got {free:,} bytes free in {place}; expected at least "
                    f"{least:,} for a checkpoint; make room"
                )

    def check_network(self, nodes: Nodes, port: int | None) -> None:
        """Connects every node to the first one, then times an all-reduce: between all GPUs, or one
        process of every node where none is asked for.

        Raises:
            NodeRefused: one cannot.
        """
        first, *others = nodes.healthy
        meeting = open_port(nodes, port)
        for node in others:
            # Nothing listens there yet; being turned away at once is as good as an answer.
            why = nodes.call(node, "reaches", first.address, meeting, CONNECT_SECONDS)
            if why is not None and "refused" not in why.lower():
                raise NodeRefused(
                    node.name,
                    f"does not reach node {first.name}: got {why} at {first.address}:{meeting}; "
                    "expected open ports between the nodes; mend routes or firewall",
                )
        each = self._request.gpus_per_node or 1
        if each * len(nodes.healthy) > 1:
            self._all_reduce(nodes, each, meeting)

    def _all_reduce(self, nodes: Nodes, each: int, port: int) -> None:
        gpus = self._request.gpus_per_node
        backend = "nccl" if gpus else "gloo"
        size = ALL_REDUCE_BYTES[backend]
        by_rank = [node for node in nodes.healthy for _ in range(each)]
        orders = {
            node: [
                Order(
                    rank=place * each + local_rank,
                    module="launch.bandwidth",
                    arguments=(backend, str(size)),
                    environment=passed_on(os.environ)
                    | {
                        "RANK": str(place * each + local_rank),
                        "WORLD_SIZE": str(len(by_rank)),
                        "LOCAL_RANK": str(local_rank),
                        "MASTER_ADDR": nodes.healthy[0].address,
                        "MASTER_PORT": str(port),
                    },
                    working_directory=os.getcwd(),
                    log=None,
                )
                for local_rank in range(each)
            ]
            for place, node in enumerate(nodes.healthy)
        }
        where = f"{len(orders)} {'nodes' if len(orders) > 1 else 'node'}"
        between = f"{len(by_rank)} GPUs of {where}" if gpus else where
        name = f"all-reduce over {backend} between {between}"
        nodes.start(orders, bind=False)
        waiting, printed = set(range(len(by_rank))), ""
        deadline = time.monotonic() + ALL_REDUCE_SECONDS
        try:
            while waiting:
                arrived, lost = nodes.news(0.5)
                if lost:
                    raise NodeRefused(lost[0].name, f"{name} failed: the node does not answer")
                for news in arrived:
                    printed += "".join(line for _, line in news.lines if line.startswith("{"))
                    _raise_failed(news, by_rank, name)
                    waiting -= {ended.rank for ended in news.ended}
                if time.monotonic() > deadline:
                    node = by_rank[max(waiting)]
                    raise NodeRefused(
                        node.name,
                        f"{name} is not over after {ALL_REDUCE_SECONDS:.0f} s; expected seconds; "
                        "mend routes, firewall or NCCL_SOCKET_IFNAME",
                    )
        finally:
            nodes.kill_ranks()
        result = json.loads(printed)
        self._tell(
            f"{name}: {size >> 20} MiB in {1000 * result['seconds']:.1f} ms, "
            f"{result['bytes_per_second'] / 1e9:.2f} GB/s"
        )


def open_port(nodes: Nodes, wanted: int | None) -> int:
    """Where rank 0 will listen: a port that is free on the first node. NodeRefused if it is not."""
    first = nodes.healthy[0]
    port = int(nodes.call(first, "free_port", wanted))
    if port == 0:
        raise NodeRefused(
            first.name,
            f"port is taken: got --port {wanted}; expected one that nothing listens on; choose "
            "another, or leave --port out",
        )
    return port


def _raise_failed(news: News, by_rank: Sequence[Node], name: str) -> None:
    for ended in news.ended:
        if ended.code:
            why = ended.message or f"exit code {ended.code}"
            raise NodeRefused(by_rank[ended.rank].name, f"{name} failed: {why.splitlines()[0]}")


def _ask_all(
    ids: Sequence[str], names: Sequence[str], question: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What every node answers. NodeRefused if one does not."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cloudpickle.register_pickle_by_value(probe_module)  # this repository may not be there
    ask = ray.remote(probe_module.probe)
    try:
        answers = [
            ask.options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            ).remote(dict(question))
            for node_id in ids
        ]
        ray.wait(answers, num_returns=len(answers), timeout=PROBE_SECONDS)
        return list(_results(answers, names))
    finally:
        cloudpickle.unregister_pickle_by_value(probe_module)


def _results(answers: Sequence[Any], names: Sequence[str]) -> Iterable[dict[str, Any]]:
    import ray

    for answer, name in zip(answers, names, strict=True):
        try:
            yield ray.get(answer, timeout=0)
        except TimeoutError:
            raise NodeRefused(name, f"does not answer within {PROBE_SECONDS:.0f} s") from None
        except ray.exceptions.TaskUnschedulableError:
            raise NodeRefused(
                name, "runs no more, though Ray still lists it; expected a live node; try again"
            ) from None
        except ray.exceptions.RayError as error:
            last = [line for line in str(error).splitlines() if line.strip()][-1]
            raise NodeRefused(name, f"cannot run a task: {last.strip()}") from None
