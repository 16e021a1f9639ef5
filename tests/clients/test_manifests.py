"""The manifests of deploy/ are what Kubernetes takes, and say what the server says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cllm import EngineConfig
from cllm.cli.app import command_line
from cllm.ray import ClusterSettings
from cllm.ray.environment import wanted
from cllm.server.config import ServerConfig
from cllm.server.operation.metrics import GAUGES

validate = pytest.importorskip(
    "kubernetes_validate",
    reason="the schemas are in an environment of their own: make test-clients",
)
yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = [
    each
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text())
]


RAY_SERVICE = "RayService"  # of KubeRay, which these schemas do not have
OWN = [each for each in MANIFESTS if each["kind"] != RAY_SERVICE]


def of_kind(kind: str) -> Any:
    return next(each for each in MANIFESTS if each["kind"] == kind)


@pytest.mark.parametrize("manifest", OWN, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
@pytest.mark.parametrize("version", ["1.30", "1.33"])
def test_a_manifest_is_what_this_version_takes(manifest: Any, version: str) -> None:
    validate.validate(manifest, version, strict=True)


def ray_pods() -> Iterator[Any]:
    """The pods that KubeRay makes."""
    cluster = of_kind(RAY_SERVICE)["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        name = {"name": group.get("groupName", "head")}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": name, **group["template"]}


@pytest.mark.parametrize("version", ["1.30", "1.33"])
def test_the_pods_of_ray_are_what_this_version_takes(version: str) -> None:
    for pod in ray_pods():
        validate.validate(pod, version, strict=True)


def test_every_pod_of_ray_has_what_ray_reads_when_it_starts() -> None:
    for pod in ray_pods():
        (container,) = pod["spec"]["containers"]
        given = {each["name"]: each.get("value") for each in container["env"]}
        assert wanted("session").items() <= given.items()
        assert "CLLM_API_KEY" in given


def test_the_application_of_ray_is_given_settings_that_there_are() -> None:
    config = yaml.safe_load(of_kind(RAY_SERVICE)["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    assert application["import_path"] == "cllm.ray:build"
    given = dict(application["args"])

    def taken(kind: Any) -> Any:
        names = {field.name for field in fields(kind)}
        return kind(**{name: given.pop(name) for name in names & given.keys()})

    engine, server, cluster = map(taken, (EngineConfig, ServerConfig, ClusterSettings))
    assert not given
    options = cluster.deployment_options(engine, server)
    worker = list(ray_pods())[1]["spec"]
    assert worker["terminationGracePeriodSeconds"] > options["graceful_shutdown_timeout_s"]
    (container,) = worker["containers"]
    assert (
        int(container["resources"]["requests"]["cpu"]) >= options["ray_actor_options"]["num_cpus"]
    )


def test_a_wrong_field_would_be_seen() -> None:
    wrong = {**of_kind("Service"), "spec": {"port": 80}}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.33", strict=True)


def test_the_deployment_speaks_of_options_ports_and_gauges_that_there_are() -> None:
    spec = of_kind("Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    commands = get_command(command_line("serve"))
    serve = commands.commands["serve"]  # type: ignore[attr-defined]
    known = {option for param in serve.params for option in param.opts}
    given = dict(argument.split("=") for argument in container["args"])
    assert given.keys() <= known
    assert container["ports"][0]["containerPort"] == ServerConfig().port
    pre_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = pre_stop + int(given["--drain-timeout"])
    assert spec["terminationGracePeriodSeconds"] > needed
    assert container["env"][0]["name"] == "CLLM_API_KEY"
    names = {
        m["pods"]["metric"]["name"] for m in of_kind("HorizontalPodAutoscaler")["spec"]["metrics"]
    }
    assert names <= {f"cllm_{name}" for name in GAUGES} | {"cllm_kv_cache_usage"}


def test_the_dockerfile_copies_no_build_of_this_machine() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["python:3.11-slim-bookworm"] * 2
    ignored = (DEPLOY.parent / ".dockerignore").read_text().split()
    assert {"cllm/_native", ".venv*", ".git"} <= set(ignored)
