"""deploy/docker/Dockerfile and deploy/compose.yaml without a container engine: the steps of the image run on a minimal
Debian, and the services run as containers would, with their users, capabilities, volumes and networks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.compose import ComposeProject
from tests.support.containers import Container, ContainerSpec, Network
from tests.support.dockerfile import ROOT, ImageBuilder, Stage
from tests.support.waiting import wait_for

BUILD_S = 1800.0  # debootstrap, apt-get and pip over the network, beside other tests
START_S = 120.0
DEPLOY = ROOT / "deploy"
SECRETS = ("bus/operator.seed", "bus/account.seed", "admin.key", "gateway.key", "ca.key", "server.key")
pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.timeout(BUILD_S),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes roots, namespaces and users"),
]
Images = dict[str, tuple[Path, Stage]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    if shutil.which("debootstrap") is None:
        pytest.skip("a minimal Debian is made with debootstrap")
    folder = tmp_path_factory.mktemp("images")
    context = folder / "context"
    built = subprocess.run([ROOT / "scripts" / "build", context / "dist"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    shutil.copytree(ROOT / "requirements", context / "requirements")
    builder = ImageBuilder(DEPLOY / "docker" / "Dockerfile", context, folder)
    names = {"corral": "corral", "worker": "corral-worker"}
    try:
        yield {name: (builder.build(stage), builder.stages[stage]) for stage, name in names.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def project(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeProject]:
    folder = tmp_path_factory.mktemp("compose")
    project = ComposeProject(DEPLOY / "compose.yaml", folder, images, POSTGRES_PASSWORD="only-in-this-test")
    try:
        project.up()
        yield project
    finally:
        project.close()
        shutil.rmtree(folder, ignore_errors=True)


def corral(project: ComposeProject, *words: str) -> str:
    """As a person types it: docker compose exec controller-1 corral …"""
    ran = project.containers["controller-1"].execute("corral", *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


_POST = """
[ -s /tmp/ca.pem ] || curl --silent --show-error --fail --insecure "https://$1:8080/ca.pem" --output /tmp/ca.pem
exec curl --silent --show-error --fail-with-body --cacert /tmp/ca.pem --header "Authorization: Bearer $2" \
  --header 'Content-Type: application/json' --data "$4" "https://$1:8080$3"
"""


def post(project: ComposeProject, gateway: str, path: str, body: dict[str, Any]) -> Any:
    """From another machine of that network: the certificate must name the gateway."""
    words = (gateway, corral_key(project), path, json.dumps(body))
    ran = project.containers["worker"].execute("sh", "-c", _POST, "post", *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def chat(project: ComposeProject, gateway: str) -> str:
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello containers"}]}
    return str(post(project, gateway, "/v1/chat/completions", body)["choices"][0]["message"]["content"])


def corral_key(project: ComposeProject) -> str:
    return (project.volume("secrets") / "admin.key").read_text().strip()


def size_of(folder: Path) -> int:
    ran = subprocess.run(["du", "--summarize", "--bytes", folder], capture_output=True, text=True, check=True)
    return int(ran.stdout.split()[0])


def test_the_image_is_small_and_has_no_secrets_and_no_build_tools(images: Images) -> None:
    root, stage = images["corral"]
    assert size_of(root) - size_of(root.with_name("debian")) < 400 * 1024**2
    assert stage.user == "corral"
    (account,) = (line for line in (root / "etc" / "passwd").read_text().splitlines() if line.startswith("corral:"))
    assert account.split(":")[2] == "10001"
    assert list((root / "secrets").iterdir()) == list((root / "gateway").iterdir()) == []
    assert not (root / "build").exists()
    assert not any((root / "usr" / "bin" / tool).exists() for tool in ("gcc", "make", "git"))


def test_the_image_by_itself_is_a_fleet_that_answers(images: Images, tmp_path: Path) -> None:
    root, stage = images["corral"]
    assert stage.healthcheck is not None
    network = Network(f"corral-{os.getpid()}-alone")
    spec = ContainerSpec(root, (*stage.entrypoint, *stage.command), env=stage.env, user=stage.user)
    container = Container("alone", spec, tmp_path / "container", network)
    try:
        container.start()
        wait_for(lambda: container.is_healthy(stage.healthcheck), "healthy container", START_S)  # type: ignore[arg-type]

        def statuses() -> list[str]:
            return [
                node["status"] for node in json.loads(container.execute("corral", "nodes", "list", "--json").stdout)
            ]

        wait_for(lambda: statuses() == ["healthy"], "healthy node")
        assert container.stop(60) == 0
    finally:
        container.close()
        network.close()


def test_the_services_start_and_both_gateways_answer(project: ComposeProject) -> None:
    for gateway in ("gateway-1", "gateway-2"):
        project.wait_healthy(gateway)
    assert "2 live" in corral(project, "doctor")
    created = json.loads(corral(project, "token", "create", "--pre-approved", "--json"))
    fingerprint = created["join_command"].split()[-1]
    assert fingerprint.startswith("sha256:")
    project.up("worker", CORRAL_TOKEN=created["secret"], CORRAL_CA=fingerprint)
    project.wait_healthy("worker")
    (node,) = json.loads(corral(project, "nodes", "list", "--json"))
    assert (node["name"], node["status"]) == ("worker", "healthy")
    post(project, "gateway-1", "/api/models", {"definition": {"name": "echo", "backend": "mock"}})
    assert [chat(project, gateway) for gateway in ("gateway-1", "gateway-2")] == ["mock 1: hello containers"] * 2


def test_each_part_has_only_its_own_secrets_and_rights(project: ComposeProject) -> None:
    inside = {
        name: {file for file in SECRETS if container.execute("cat", f"/secrets/{file}").returncode == 0}
        for name, container in project.containers.items()
        if container.running and name != "postgres"
    }
    whole = set(SECRETS)
    assert inside == {
        **{name: whole for name in ("bus", "controller-1", "controller-2")},
        **{name: set[str]() for name in ("gateway-1", "gateway-2", "worker")},
    }
    gateway = project.containers["gateway-1"]
    assert set(gateway.execute("ls", "/gateway").stdout.split()) == {
        "ca.crt",
        "gateway.key",
        "server.crt",
        "server.key",
    }
    for command in (("touch", "/opt/corral/new"), ("touch", "/gateway/new")):
        assert "Read-only file system" in gateway.execute(*command).stderr
    assert gateway.execute("sh", "-c", "grep -E 'CapBnd|NoNewPrivs' /proc/1/status").stdout.split() == [
        *("CapBnd:", "0" * 16),
        *("NoNewPrivs:", "1"),
    ]
    worker = project.containers["worker"]
    backend = worker.execute(
        "sh", "-c", "for each in /proc/[0-9]*; do grep -qs mock[.]py $each/cmdline && stat -c %U $each; done"
    )
    assert backend.stdout.split() == ["corral-backend"]
    stolen = worker.execute("setpriv", "--reuid=10002", "--clear-groups", "cat", "/var/lib/corral/identity.json")
    assert "Permission denied" in stolen.stderr


def test_one_controller_and_its_gateway_may_end(project: ComposeProject) -> None:
    project.containers["controller-1"].kill()
    assert chat(project, "gateway-1") == chat(project, "gateway-2") == "mock 1: hello containers"
    project.down("gateway-1")
    assert chat(project, "gateway-2") == "mock 1: hello containers"
    project.up("worker")
    project.wait_healthy("gateway-1")
    assert chat(project, "gateway-1") == "mock 1: hello containers"


def test_all_of_it_is_there_after_a_restart(project: ComposeProject) -> None:
    key, ca = corral_key(project), (project.volume("secrets") / "ca.crt").read_text()
    project.down()
    project.up("worker", CORRAL_TOKEN="", CORRAL_CA="")  # the token was needed once
    for name in ("gateway-1", "gateway-2", "worker"):
        project.wait_healthy(name)
    assert (corral_key(project), (project.volume("secrets") / "ca.crt").read_text()) == (key, ca)
    (node,) = json.loads(corral(project, "nodes", "list", "--json"))
    assert (node["name"], node["status"]) == ("worker", "healthy")
    assert [chat(project, gateway) for gateway in ("gateway-1", "gateway-2")] == ["mock 1: hello containers"] * 2
