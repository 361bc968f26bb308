"""`corral service`: a worker installed from the wheel and run as its unit says, in a sandbox like that of systemd."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.fleet import PATIENT, SHORT, Fleet, http
from tests.support.processes import Process, alive, clean_env, free_port
from tests.support.service_unit import ServiceUnit
from tests.support.uv import find_uv
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"  # one that everybody can run; the tests' own may be root's
pytestmark = [
    pytest.mark.root,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mounts and gives backends another user"),
]


def run(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Open to others, as a machine is: pytest's own folders are for root only."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def corral(root: Path) -> Path:
    """The command, installed from the wheel."""
    assert run(ROOT / "scripts" / "build", root / "dist").returncode == 0
    env = clean_env(root / "home")
    assert run(find_uv(), "venv", "--python", PYTHON, root / "program", env=env).returncode == 0
    wheel = next((root / "dist").glob("*.whl"))
    pinned = re.findall(r"^[\w.-]+==[^ \\]+", (ROOT / "requirements" / "runtime.txt").read_text(), re.MULTILINE)
    (root / "versions.txt").write_text("\n".join(pinned))
    constraints = ("--constraints", root / "versions.txt")
    ran = run(find_uv(), "pip", "install", "--python", root / "program", *constraints, wheel, env=env)
    assert ran.returncode == 0, ran.stderr
    return root / "program" / "bin" / "corral"


@pytest.fixture(scope="module")
def fleet(root: Path) -> Iterator[Fleet]:
    fleet = Fleet(root, "--no-worker", **PATIENT)
    try:
        yield fleet.start()
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def unit(root: Path, corral: Path, fleet: Fleet) -> ServiceUnit:
    """As `corral service install worker` writes it, with the settings in its file."""
    data = root / "worker"
    data.mkdir(mode=0o700)
    settings = {
        "CORRAL_CONTROLLER": fleet.url,
        "CORRAL_TOKEN": fleet.token("--pre-approved"),
        "CORRAL_NAME": "served",
        "CORRAL_PORT": str(free_port()),
        **{name: value for name, value in SHORT.items() if name not in ("CORRAL_GALLERIES", "CORRAL_MODEL_GALLERIES")},
    }
    env_file = root / "worker.env"
    env_file.write_text("".join(f'{name}="{value}"\n' for name, value in settings.items()))
    given = (word for name in ("CORRAL_CONTROLLER", "CORRAL_NAME") for word in ("--set", f"{name}={settings[name]}"))
    printed = run(
        corral, "service", "install", "worker", "--data", data, "--dry-run", *given, env=clean_env(root / "home")
    )
    assert printed.returncode == 0, printed.stderr
    settings_file, _, text = printed.stdout.partition("# /etc/systemd/system/corral-worker.service\n")
    assert "CORRAL_NAME=served\n" in settings_file
    return ServiceUnit(text.replace("/etc/corral/worker.env", str(env_file)), root)


@pytest.fixture
def service(unit: ServiceUnit, fleet: Fleet, tmp_path: Path) -> Iterator[Process]:
    process = unit.start(tmp_path / "journal")
    try:
        fleet.wait_status("served", "healthy")
        yield process
    finally:
        process.close()


def chat(fleet: Fleet) -> str:
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello service"}]}
    answer = fleet.api("POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["message"]["content"])


def backend(root: Path) -> psutil.Process:
    """That of this worker: other tests start the same program meanwhile."""
    (found,) = (
        each
        for each in psutil.process_iter(["cmdline", "cwd"])
        if "mock.py" in (each.info["cmdline"] or ()) and Path(each.info["cwd"] or "/").is_relative_to(root)
    )
    return found


def test_a_worker_serves_survives_a_crash_reloads_and_stops(
    unit: ServiceUnit, service: Process, fleet: Fleet, root: Path, tmp_path: Path
) -> None:
    added = fleet.api("POST", "/api/models", {"definition": {"name": "echo", "backend": "mock"}})
    assert added.status == 201, added.body
    assert "hello service" in chat(fleet)
    first = backend(root)
    user = first.uids().real
    assert user != 0
    for name in ("identity.json", "ingress.key"):
        stolen = run("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "cat", root / "worker" / name)
        assert "Permission denied" in stolen.stderr, f"the user of the backends can read {name}"

    service.kill()  # KillMode=process: systemd ends nothing else
    assert alive(first.pid)
    again = unit.start(tmp_path / "second")
    try:
        fleet.wait_status("served", "healthy")
        wait_for(lambda: "hello service" in chat(fleet), "answer of the adopted backend")
        assert backend(root).pid == first.pid

        reloaded = unit.reload()
        assert reloaded.returncode == 0, reloaded.stderr
        assert again.running, "systemd still knows the process"
        ready = fleet.nodes()["served"]["ingress_url"] + "/readyz"
        wait_for(lambda: http("GET", ready).status == 200, "new worker that has registered")
        assert "hello service" in chat(fleet)
        assert backend(root).pid == first.pid

        assert again.stop(unit.stop_timeout_s) == 0
        assert not alive(first.pid)
        fleet.wait_status("served", "offline")
    finally:
        again.close()
