"""deploy/kubernetes rendered by helm: valid for Kubernetes by its own schemas, and settings, commands, ports, names and
secrets of each container fit each other. A cluster is not needed and not emulated."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.bus.keys import file_names
from tests.support import deployed
from tests.support.dockerfile import parse_dockerfile

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "kubernetes"
TOOLS_S = 1500.0  # helm is built once
VERSIONS = ("1.27", "1.32", "1.37")  # the oldest that Chart.yaml allows, one between, the newest that the schemas have
STAGES = parse_dockerfile((ROOT / "deploy" / "docker" / "Dockerfile").read_text())
pytestmark = [pytest.mark.long, pytest.mark.timeout(TOOLS_S)]

EVERYTHING = {
    "publicUrl": "https://fleet.example",
    "imagePullSecrets": [{"name": "registry"}],
    "controller": {"env": {"CORRAL_STALE_AFTER": "90s"}, "nodeSelector": {"disk": "fast"}},
    "gateway": {
        "env": {"CORRAL_CORS_ORIGINS": "https://chat.example"},
        "service": {"type": "LoadBalancer", "port": 443, "annotations": {"example.com/internal": "true"}},
        "tolerations": [{"key": "gateways", "operator": "Exists"}],
    },
    "worker": {
        "enabled": True,
        "runtimeClassName": "nvidia",
        "resources": {"limits": {"nvidia.com/gpu": 2}},
        "tolerations": [{"operator": "Exists"}],
    },
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "workers": {"worker": {"enabled": True}},
    "one of each": {"controller": {"replicas": 1}, "gateway": {"replicas": 1}},
    "own bus": {"bus": {"enabled": False, "url": "tls://nats.example:4222"}},
    "everything": EVERYTHING,
}
NOTES = """
apiVersion: v1
kind: ConfigMap
metadata: {name: notes}
data:
  text: |
{{ tpl (.Files.Get "notes") . | indent 4 }}
"""


@pytest.fixture(scope="module")
def tools() -> Path:
    made = subprocess.run([ROOT / "scripts" / "_chart_tools"], capture_output=True, text=True, timeout=TOOLS_S)
    if "Go 1.24 or later is needed" in made.stderr:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Nothing of the user's: no repositories, no plugins, no cluster."""
    folder = str(tmp_path_factory.mktemp("helm"))
    return {"PATH": os.environ["PATH"], "HOME": folder, "KUBECONFIG": "/dev/null"}


class Chart:
    def __init__(self, tools: Path, home: dict[str, str], folder: Path, values: dict[str, Any]) -> None:
        self._tools, self._home = tools, home
        self.values = folder / "values.yaml"
        self.values.write_text(yaml.safe_dump(values))
        self.rendered = folder / "rendered.yaml"
        ran = self.helm("template", "farm", str(CHART), "--namespace", "ai", "--kube-version", "1.32")
        assert ran.returncode == 0, ran.stderr
        self.rendered.write_text(ran.stdout)
        self.objects = [each for each in yaml.safe_load_all(ran.stdout) if each]

    def helm(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self._tools / "helm"), *words, "--values", str(self.values)]
        return subprocess.run(command, env=self._home, capture_output=True, text=True, timeout=60)

    def validate(self, version: str) -> subprocess.CompletedProcess[str]:
        command = [
            str(self._tools / "kubernetes-validate"),
            "--strict",
            "--kubernetes-version",
            version,
            str(self.rendered),
        ]
        return subprocess.run(command, env=self._home, capture_output=True, text=True, timeout=60)

    def kind(self, *kinds: str) -> dict[str, Any]:
        return {each["metadata"]["name"].removeprefix("farm-"): each for each in self.objects if each["kind"] in kinds}

    @property
    def pods(self) -> dict[str, Any]:
        return {role: each["spec"]["template"] for role, each in self.kind("Deployment", "DaemonSet").items()}

    def containers(self) -> Iterator[tuple[str, Any, Any]]:
        """Role, pod, container."""
        for role, pod in self.pods.items():
            for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                yield role, pod["spec"], container


def environment(container: dict[str, Any]) -> dict[str, str]:
    """With what the kubelet puts in: the address of the pod, and values of secrets. Its files are not here."""
    env = dict(STAGES["worker" if container["name"] == "worker" else "corral"].env)
    known = {"POD_IP": "10.1.2.3", "CORRAL_STORE": "postgresql://corral:p@db/corral", "CORRAL_TOKEN": "cj_t"}
    for each in container["env"]:
        text = each["value"] if "value" in each else known.get(each["name"], "farm-7d9")
        if each["name"] == "CORRAL_CA":
            text = "sha256:" + "0" * 64
        env[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text)
    return env


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.replace(" ", "-"))
def chart(
    request: pytest.FixtureRequest, tools: Path, home: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Chart:
    return Chart(tools, home, tmp_path_factory.mktemp("chart"), CASES[request.param])


def test_helm_finds_no_fault(chart: Chart) -> None:
    ran = chart.helm("lint", str(CHART), "--strict", "--kube-version", "1.32")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(chart: Chart, version: str) -> None:
    ran = chart.validate(version)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count(" passed for resource ") == len(chart.objects) > 5


def test_the_schemas_find_a_fault(chart: Chart) -> None:
    """So that the test above can fail."""
    right = chart.rendered.read_text()
    chart.rendered.write_text(right.replace("containerPort: 8080", "containerPorts: 8080"))
    try:
        assert chart.validate("1.32").returncode != 0
    finally:
        chart.rendered.write_text(right)


def test_commands_and_settings_can_be_used(chart: Chart) -> None:
    for role, _, container in chart.containers():
        env = environment(container)
        words = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word) for word in container["args"]]  # noqa: B023
        deployed.parse_command(words)
        if words[0] == role:
            assert deployed.unknown_variables(role, [each["name"] for each in container["env"]]) == set()
            deployed.read_role(role, env)
            names = [each["name"] for each in container["env"]]
            assert len(names) == len(set(names))


def test_services_lead_to_pods_and_urls_to_services(chart: Chart) -> None:
    ports: dict[tuple[str, int], int] = {}
    for role, service in chart.kind("Service").items():
        pod = chart.pods[role]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        named = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            ports[f"farm-{role}", port["port"]] = named[port["targetPort"]]
    for role, _, container in chart.containers():
        env = environment(container)
        own = {
            ("10.1.2.3", 8090),
            ("127.0.0.1", 8080),
            ("127.0.0.1", 50050),
            ("nats.example", 4222),
            ("fleet.example", 0),
        }
        env.pop("CORRAL_CORS_ORIGINS", "")
        assert {(host, port) for _, host, port in deployed.hosts_in(env)} <= ports.keys() | own, role
        if container["args"][0] == role:
            assert container["ports"][0]["containerPort"] == int(env["CORRAL_PORT"])


def test_budgets_and_selectors_choose_the_pods_of_their_role(chart: Chart) -> None:
    replicated = {role for role, each in chart.kind("Deployment").items() if each["spec"]["replicas"] > 1}
    budgets = chart.kind("PodDisruptionBudget")
    assert budgets.keys() == replicated, "a budget for one pod would hold up every drain"
    for role, each in (chart.kind("Deployment", "DaemonSet") | budgets).items():
        assert each["spec"]["selector"]["matchLabels"].items() <= chart.pods[role]["metadata"]["labels"].items()


def test_files_are_mounted_and_secrets_are_those_that_are_created(chart: Chart) -> None:
    of_a_gateway = {"gateway.key", "ca.crt", "server.crt", "server.key"}
    everything = {"admin.key", "gateway.key", "ca.crt", "ca.key", "server.crt", "server.key", *file_names().values()}
    for role, pod, container in chart.containers():
        volumes = {each["name"]: each for each in pod["volumes"]}
        places = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        taken = {item["key"] for each in volumes.values() for item in each.get("secret", {}).get("items", ())}
        allowed = {"gateway": of_a_gateway, "worker": {"ca.crt"}}.get(role, everything)
        assert taken <= allowed, f"{role} has secrets of others"
        for path in deployed.secret_paths(environment(container)):
            folder, _, file = path.removeprefix("/").partition("/")
            volume = places[f"/{folder}"]
            paths = {item["path"] for item in volume.get("secret", {}).get("items", ())}
            assert "emptyDir" in volume or file in paths or any(each.startswith(f"{file}/") for each in paths), path


def test_only_workers_are_root_and_nobody_has_more_than_it_needs(chart: Chart) -> None:
    for role, pod, container in chart.containers():
        rights = pod.get("securityContext", {}) | container["securityContext"]
        assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
        assert rights["capabilities"]["drop"] == ["ALL"]
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
        added = sorted(rights["capabilities"].get("add", []))
        if role == "worker":
            assert (rights["runAsUser"], added) == (0, deployed.WORKER_CAPABILITIES)
        else:
            assert (rights["runAsNonRoot"], rights["runAsUser"], added) == (True, 10001, [])
        assert pod["automountServiceAccountToken"] is False


def test_pods_have_the_time_that_their_role_needs_to_stop(chart: Chart) -> None:
    for role, pod in chart.pods.items():
        hook = pod["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})
        pause_s = int(hook["exec"]["command"][1])
        assert pod["spec"]["terminationGracePeriodSeconds"] == deployed.stop_s(role) + pause_s


def test_values_that_cannot_work_are_refused(tools: Path, home: dict[str, str], tmp_path: Path) -> None:
    chart = Chart(tools, home, tmp_path, {})
    ran = chart.helm("template", "farm", str(CHART), "--kube-version", "1.32", "--set", "bus.enabled=false")
    assert ran.returncode != 0
    assert "bus.url: where your NATS is" in ran.stderr


def test_the_notes_name_commands_that_can_be_typed(tools: Path, home: dict[str, str], tmp_path: Path) -> None:
    """helm prints them only with a cluster: here a copy of the chart renders their text into an object."""
    copied = shutil.copytree(CHART, tmp_path / "copied")
    (copied / "templates" / "NOTES.txt").rename(copied / "notes")
    (copied / "templates" / "notes.yaml").write_text(NOTES)
    ran = Chart(tools, home, tmp_path, {}).helm("template", "farm", str(copied), "--kube-version", "1.32")
    assert ran.returncode == 0, ran.stderr
    (notes,) = (each for each in yaml.safe_load_all(ran.stdout) if each and each["kind"] == "ConfigMap")
    commands = re.findall(r"-- corral (.+)$", notes["data"]["text"], re.MULTILINE)
    assert len(commands) == 3
    for words in commands:
        deployed.parse_command(words.split())
