"""Dockerfile, compose files and chart name settings, commands, ports, probes and secrets that the code has.

The chart is read as text here; tests/e2e/test_chart.py renders it.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.bus.keys import file_names
from corral.cli.common.data_folder import SecretsFolder
from corral.cli.run import root
from corral.controller.api.meta import healthz, readyz
from corral.controller.settings import ControllerSettings
from corral.gateway.http.status_routes import STATUS_PATHS
from corral.gateway.settings import GatewaySettings
from corral.kit.settings import describe
from tests.support import deployed
from tests.support.compose import read_services
from tests.support.dockerfile import BASE, parse_dockerfile

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
STAGES = parse_dockerfile((DEPLOY / "docker" / "Dockerfile").read_text())
IMAGES = {"corral": STAGES["corral"], "corral-worker": STAGES["worker"]}
GIVEN = {"POSTGRES_PASSWORD": "p", "CORRAL_TOKEN": "cj_t", "CORRAL_CA": "sha256:" + "0" * 64}
SERVICES = read_services(DEPLOY / "compose.yaml", GIVEN)
OURS = {name: service for name, service in SERVICES.items() if service["image"] in IMAGES}
ROLES = {name: service["command"][0] for name, service in OURS.items() if service["command"][0] in deployed.SETTINGS}
TEMPLATES = {path.stem: path.read_text() for path in (DEPLOY / "kubernetes" / "templates").glob("*.yaml")}
VALUES: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / "values.yaml").read_text())
FILES = SecretsFolder(Path("/secrets"))
SECRETS = {
    str(path.relative_to("/secrets"))
    for path in (FILES.admin_key, FILES.gateway_key, FILES.ca_cert, FILES.ca_key, FILES.server_cert, FILES.server_key)
}
BUS_KEYS = set(file_names().values())
OF_A_GATEWAY = {"gateway.key", "ca.crt", "server.crt", "server.key"}


def environment(name: str) -> dict[str, str]:
    """Of the container of a service."""
    service = OURS[name]
    given = {key: str(value) for key, value in service.get("environment", {}).items()}
    return IMAGES[service["image"]].env | given


def default_of(kind: type[Any], env: str) -> str:
    return next(doc.default for doc in describe(kind) if doc.env == env)


# the image


def test_stages_are_built_on_one_base_and_the_last_is_not_root() -> None:
    assert {stage.base for stage in STAGES.values()} == {BASE, "base"}
    assert list(STAGES)[-1] == "corral"
    assert STAGES["corral"].user == "corral"
    assert STAGES["worker"].user == "root", "only root gives backends another user"


@pytest.mark.parametrize("stage", IMAGES.values(), ids=IMAGES)
def test_what_an_image_runs_is_a_command_and_what_it_sets_is_a_setting(stage: Any) -> None:
    assert stage.entrypoint[-1] == "corral"
    deployed.parse_command(stage.command)
    ours = {name for name in stage.env if name.startswith("CORRAL_")}
    assert ours <= {doc.env for kind in deployed.SETTINGS.values() for doc in describe(kind)}
    assert ours >= {"CORRAL_DATA", "CORRAL_HOST"}


def test_the_health_check_asks_the_default_port_of_the_role() -> None:
    found = {name: stage.env["HEALTH_URL"] for name, stage in IMAGES.items()}
    ports = {name: stage.ports for name, stage in IMAGES.items()}
    gateway = default_of(GatewaySettings, "CORRAL_PORT")
    assert found == {
        "corral": f"https://127.0.0.1:{gateway}/readyz",
        "corral-worker": "https://127.0.0.1:50050/readyz",
    }
    assert ports == {"corral": (int(gateway),), "corral-worker": (50050,)}
    for stage in IMAGES.values():
        assert stage.healthcheck is not None
        assert "$HEALTH_URL" in stage.healthcheck.command[-1]


def test_debians_python_is_new_enough_and_everything_copied_is_in_the_context() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert wanted == ">=3.11", "bookworm has 3.11: choose another base image"
    copied = {step.text.split()[0] for stage in STAGES.values() for step in stage.steps if step.keyword == "COPY"}
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().split()
    assert {word for word in copied if not word.startswith("--from")} == {line[1:] for line in ignored if line != "*"}
    assert (ROOT / "requirements" / "runtime.txt").is_file()


# compose


def test_the_issue_of_the_file_is_whole() -> None:
    found = sorted(ROLES.values())
    assert found == ["bus", "controller", "controller", "gateway", "gateway", "worker"]
    assert {service["image"].split(":")[0] for service in SERVICES.values()} == {"corral", "corral-worker", "postgres"}
    for service in OURS.values():
        build = service["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        assert IMAGES[service["image"]] is STAGES[build["target"]]


@pytest.mark.parametrize("name", OURS)
def test_commands_of_services_can_be_typed(name: str) -> None:
    deployed.parse_command(OURS[name]["command"])


@pytest.mark.parametrize("name", ROLES)
def test_settings_of_services_are_known_and_can_be_used(name: str) -> None:
    role, given = ROLES[name], OURS[name]["environment"]
    assert deployed.unknown_variables(role, given) == set()
    deployed.read_role(role, environment(name))


@pytest.mark.parametrize("name", ROLES)
def test_rights_and_times_are_those_of_the_services_of_systemd(name: str) -> None:
    service, role = OURS[name], ROLES[name]
    assert service["cap_drop"] == ["ALL"]
    assert sorted(service.get("cap_add", [])) == (deployed.WORKER_CAPABILITIES if role == "worker" else [])
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("stop_grace_period", "10s") == f"{deployed.stop_s(role)}s"


@pytest.mark.parametrize("name", [name for name, role in ROLES.items() if role != "bus"])
def test_health_urls_lead_to_a_probe_of_the_role(name: str) -> None:
    env = environment(name)
    assert env["HEALTH_URL"] == f"https://127.0.0.1:{env['CORRAL_PORT']}/readyz"


def test_urls_lead_to_a_port_of_a_service_that_the_certificate_names() -> None:
    created = [word.removeprefix("--name=") for word in OURS["secrets"]["command"] if word.startswith("--name=")]
    listens = {(name, int(environment(name)["CORRAL_PORT"])) for name in ROLES}
    listens |= {
        (name, int(environment(name)["CORRAL_BLOB_PORT"])) for name, role in ROLES.items() if role == "controller"
    }
    urls = {url for name in ROLES for url in deployed.hosts_in(OURS[name]["environment"])}
    inside = {(scheme, host, port) for scheme, host, port in urls if host not in ("127.0.0.1", "localhost")}
    assert {(host, port) for _, host, port in inside} <= listens
    assert {scheme for scheme, _, _ in inside} == {"https", "tls"}
    assert {host for _, host, _ in inside} <= set(created)
    for name, role in ROLES.items():
        for text in OURS[name].get("ports", []):
            assert role == "gateway"
            assert text.split(":")[1] == environment(name)["CORRAL_PORT"]


@pytest.mark.parametrize("name", ROLES)
def test_files_of_services_are_secrets_that_are_created(name: str) -> None:
    mounted = {text.split(":")[1] for text in OURS[name]["volumes"] if ":" in text}
    for path in deployed.secret_paths(OURS[name]["environment"]):
        folder, _, file = path.removeprefix("/").partition("/")
        assert f"/{folder}" in mounted
        assert file in (SECRETS | {"bus"} if folder == "secrets" else OF_A_GATEWAY), path
    assert ("/secrets" in mounted) == (ROLES[name] in ("controller", "bus"))


def test_the_other_compose_file_changes_a_service_that_is_there() -> None:
    services = yaml.safe_load((DEPLOY / "compose.nvidia.yaml").read_text())["services"]
    assert services.keys() == {"worker"} <= SERVICES.keys()


# the chart


@pytest.mark.parametrize("role", TEMPLATES)
def test_a_template_names_settings_and_commands_of_its_role(role: str) -> None:
    text = TEMPLATES[role]
    names = set(re.findall(r"\bname: (CORRAL_\w+)", text))
    assert names
    assert deployed.unknown_variables(role, names) == set()
    assert re.findall(r"^          args: \[(\w+)\]$", text, re.MULTILINE) == [role]
    assert role in root().list_commands(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", TEMPLATES)
def test_a_template_has_the_ports_probes_and_rights_of_its_role(role: str) -> None:
    text = TEMPLATES[role]
    port = re.findall(r'CORRAL_PORT, value: "(\d+)"', text)
    assert re.findall(r"containerPort: (\d+)", text)[:1] == port
    paths = set(re.findall(r"path: (/\w+), port", text))
    assert paths <= deployed.PROBES
    assert text.count("readinessProbe") == text.count("livenessProbe") == 1
    grace = int(re.findall(r"terminationGracePeriodSeconds: (\d+)", text)[0])
    pause = int((re.findall(r'command: \[sleep, "(\d+)"\]', text) or ["0"])[0])
    assert grace == deployed.stop_s(role) + pause
    added = re.findall(r"add: \[([\w, ]+)\]", text)
    assert [sorted(each.split(", ")) for each in added] == ([deployed.WORKER_CAPABILITIES] if role == "worker" else [])


def test_the_probes_are_routes_of_the_roles() -> None:
    assert {path.decode() for path in STATUS_PATHS} >= deployed.PROBES
    assert {*healthz.paths, *readyz.paths} == deployed.PROBES


def test_the_chart_takes_its_secrets_under_the_names_that_are_created() -> None:
    helpers = (DEPLOY / "kubernetes" / "templates" / "_helpers.tpl").read_text()
    files, keys = re.findall(r"range tuple ([^}]+)}}", helpers)
    assert set(re.findall(r'"([^"]+)"', files)) == SECRETS
    assert set(re.findall(r'"([^"]+)"', keys)) == BUS_KEYS


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((DEPLOY / "kubernetes" / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["appVersion"] == chart["version"] == version


def test_chart_and_compose_use_the_same_ports_and_images() -> None:
    ports = {role: re.findall(r'CORRAL_PORT, value: "(\d+)"', text)[0] for role, text in TEMPLATES.items()}
    assert ports == {role: environment(name)["CORRAL_PORT"] for name, role in ROLES.items()}
    assert {VALUES["image"], VALUES["workerImage"]} == set(IMAGES)
    assert str(VALUES["gateway"]["service"]["port"]) == default_of(GatewaySettings, "CORRAL_PORT")
    assert default_of(ControllerSettings, "CORRAL_PORT") == "0", "files must name the port of controllers"
