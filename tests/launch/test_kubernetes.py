"""The Kubernetes files, as far as a machine without Kubernetes can tell: every field is one that
KubeRay documents, with its type; the parts agree with each other, with the image and with the
command line."""

import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from launch.__main__ import app
from pretrain.config import load_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "launch" / "kubernetes"
IMAGE_ROOT = "/fenwick"


def of(required: list[str], **properties: Any) -> dict[str, Any]:
    """Schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def many(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
QUANTITY = {
    "anyOf": [COUNT, {"type": "string", "pattern": r"^\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"}]
}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
POD = of(
    ["spec"],
    metadata=of([], labels=TEXTS, annotations=TEXTS),
    spec=of(
        ["containers"],
        containers=many(
            of(
                ["name", "image"],
                name=TEXT,
                image=TEXT,
                env=many(of(["name", "value"], name=TEXT, value=TEXT)),
                resources=of([], requests=QUANTITIES, limits=QUANTITIES),
                volumeMounts=many(of(["name", "mountPath"], name=TEXT, mountPath=TEXT)),
            )
        ),
        volumes=many(
            of(
                ["name"],
                name=TEXT,
                persistentVolumeClaim=of(["claimName"], claimName=TEXT),
                emptyDir=of([], medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
            )
        ),
        nodeSelector=TEXTS,
    ),
)
# From the documented fields of ray.io/v1, those that a training job has a use for.
RAY_JOB = of(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=of(["name"], name={"type": "string", "pattern": "^[a-z0-9-]{1,47}$"}, labels=TEXTS),
    spec=of(
        ["entrypoint", "rayClusterSpec"],
        entrypoint=TEXT,
        backoffLimit=COUNT,
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        suspend={"type": "boolean"},
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        submitterPodTemplate=POD,
        rayClusterSpec=of(
            ["headGroupSpec"],
            rayVersion=TEXT,
            authOptions=of(["mode"], mode={"enum": ["disabled", "token"]}),
            headGroupSpec=of(["template"], rayStartParams=TEXTS, template=POD),
            workerGroupSpecs=many(
                of(
                    ["groupName", "template"],
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=TEXTS,
                    template=POD,
                )
            ),
        ),
    ),
)
CLAIM = of(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "v1"},
    kind={"const": "PersistentVolumeClaim"},
    metadata=of(["name"], name=TEXT),
    spec=of(
        ["accessModes", "resources"],
        accessModes=many({"enum": ["ReadWriteMany"]}),  # a run's machines all write into it
        resources=of(["requests"], requests=QUANTITIES),
        storageClassName=TEXT,
    ),
)


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.fixture
def job() -> Any:
    return read("rayjob.yaml")


def test_every_field_is_one_that_kuberay_knows(job: Any) -> None:
    jsonschema.validate(job, RAY_JOB)
    jsonschema.validate(read("volume.yaml"), CLAIM)


def test_the_schema_sees_a_wrong_field_and_a_wrong_type(job: Any) -> None:
    job["spec"]["shutdownAfterJobFinish"] = True
    with pytest.raises(jsonschema.ValidationError, match="shutdownAfterJobFinish"):
        jsonschema.validate(job, RAY_JOB)
    del job["spec"]["shutdownAfterJobFinish"]
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] = 0
    with pytest.raises(jsonschema.ValidationError, match="0 is not of type 'string'"):
        jsonschema.validate(job, RAY_JOB)


def pods(job: Any) -> list[Any]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"]["spec"]] + [
        group["template"]["spec"] for group in cluster["workerGroupSpecs"]
    ]


def test_all_pods_run_one_image_and_share_the_volume(job: Any) -> None:
    assert len({pod["containers"][0]["image"] for pod in pods(job)}) == 1
    for pod in pods(job):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {m["mountPath"]: volumes[m["name"]] for m in pod["containers"][0]["volumeMounts"]}
        claim = mounts["/shared"]["persistentVolumeClaim"]["claimName"]
        assert claim == read("volume.yaml")["metadata"]["name"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        resources = pod["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]


def test_the_command_asks_for_what_the_cluster_has(job: Any) -> None:
    entrypoint = job["spec"]["entrypoint"]
    assert re.fullmatch(r"[\w/.,:= -]+", entrypoint), "no shell may be needed to read it"
    python, flag, module, *words = shlex.split(entrypoint)
    assert (python, flag, module) == ("python", "-m", "launch")
    command = typer.main.get_command(app)
    context = command.make_context("launch", words)
    if hasattr(command, "resolve_command"):  # a group whose default command trains
        _, command, words = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context("launch", words)
    asked = context.params
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert asked["nodes"] == group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert asked["gpus_per_node"] == limits["nvidia.com/gpu"]
    assert asked["address"] == "auto"
    config = Path(asked["config"]).relative_to(IMAGE_ROOT)
    run = load_config(ROOT / config, asked["overrides"])
    assert str(run.run_dir).startswith("/shared/")
    assert str(run.data.dataset).startswith("/shared/")


def test_versions_are_those_we_test_with(job: Any) -> None:
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == pinned[1]


def test_the_image_holds_all_that_runs() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line[:1] not in ("", "#")]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV"}
    assert {instruction for instruction, _ in lines} <= known
    assert lines[0][0] == "FROM"
    version = re.match(r"python:3\.(\d+)-", lines[0][1])
    assert version is not None
    assert int(version[1]) >= 10
    assert ["WORKDIR", IMAGE_ROOT] in lines
    (environment,) = [rest for instruction, rest in lines if instruction == "ENV"]
    assert f"PYTHONPATH={IMAGE_ROOT}" in environment.split()
    copied = [rest.split() for instruction, rest in lines if instruction == "COPY"]
    for *sources, _ in copied:
        for source in sources:
            assert (ROOT / source).exists()
    folders = {source for *sources, target in copied for source in sources if source == target}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == packages
