"""The installer of joining machines, run whole: interrupted and run again, without space, behind a proxy."""

from __future__ import annotations

import base64
import contextlib
import csv
import ensurepip
import hashlib
import io
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from corral.controller.distribution.installer import install_command, make_installer
from corral.controller.distribution.own_wheel import OwnWheel
from tests.support.certificates import TestCa
from tests.support.waiting import wait_for

TOKEN = "cj_secretsecretsecret"
PIP = next(Path(ensurepip.__file__).parent.joinpath("_bundled").glob("pip-*.whl"))
PIP_SHA256 = hashlib.sha256(PIP.read_bytes()).hexdigest()
_PROGRAM = """import sys
def main():
    if sys.argv[1:] == ["--version"]:
        print("corral {version}")
    else:
        print("joined", *sys.argv[1:], sys.stdin.read().strip())
"""


def make_wheel(version: str) -> OwnWheel:
    """A Corral that joins by saying so, and needs nothing."""
    info = f"corral-{version}.dist-info"
    files = {
        "corral/__init__.py": _PROGRAM.format(version=version),
        "corral/_requirements.txt": "",
        "corral/_pip.txt": f"pip=={PIP.name.split('-')[1]} --hash=sha256:{PIP_SHA256}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: corral\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ncorral = corral:main\n",
    }
    buffer, record = io.BytesIO(), io.StringIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            csv.writer(record, lineterminator="\n").writerow((path, f"sha256={digest}", len(text.encode())))
            archive.writestr(zipfile.ZipInfo(path), text)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), f"{record.getvalue()}{info}/RECORD,,\n")
    data = buffer.getvalue()
    return OwnWheel(f"corral-{version}-py3-none-any.whl", version, data, hashlib.sha256(data).hexdigest())


class Fleet:
    """The routes of a controller that a machine needs before it joins."""

    def __init__(self, wheel: OwnWheel, ca: str = "") -> None:
        self.wheel = wheel
        self.installer = make_installer(wheel, ca)
        self.ca_pem = ""
        self.held: threading.Event | None = None  # wheels wait for it
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = outer.answer(self.path, self.headers["Authorization"] or "")
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                if outer.held is not None and body and "/wheels/" in self.path:
                    self.wfile.write(body[:100])
                    self.wfile.flush()
                    outer.held.wait(30)
                    body = body[100:]
                with contextlib.suppress(OSError):  # the installer was killed
                    self.wfile.write(body or b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.scheme = "http"

    def answer(self, path: str, authorization: str) -> bytes | None:
        self.asked.append(path)
        if path == "/install.sh":
            return self.installer.text.encode()
        if path == "/ca.pem":
            return self.ca_pem.encode()
        assert authorization == f"Bearer {TOKEN}"
        if path.startswith("/install/wheels?"):
            return json.dumps({"wheels": [{"name": PIP.name, "sha256": PIP_SHA256}], "ready": True}).encode()
        return {self.wheel.sha256: self.wheel.data, PIP_SHA256: PIP.read_bytes()}.get(path.rpartition("/")[2])

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server.server_port}"

    @property
    def line(self) -> str:
        return install_command(self.url, self.installer.sha256, TOKEN)

    def __enter__(self) -> Fleet:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.held is not None:
            self.held.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Machine:
    """A home, and what runs there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.programs = root / "data" / "corral"
        self.env = {
            "PATH": f"{Path(sys.executable).resolve().parent}:/usr/bin:/bin",
            "HOME": str(root),
            "CORRAL_DATA": str(root / "data"),
            "CORRAL_BIN": str(root / "bin"),
            "CORRAL_INSTALL_PAUSE": "0.01",
        }

    def start(self, line: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", "-c", line],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, line: str) -> tuple[int, str, str]:
        with self.start(line) as running:
            out, err = running.communicate(timeout=120)
        return running.returncode, out, err

    def version(self, wheel: OwnWheel) -> Path:
        return self.programs / "versions" / wheel.sha256[:16]

    def assert_installed(self, wheel: OwnWheel) -> None:
        version = self.version(wheel)
        assert (version / ".complete").exists()
        assert (self.programs / "current").resolve() == version.resolve()
        shown = subprocess.run([self.root / "bin" / "corral", "--version"], capture_output=True, text=True, timeout=30)
        assert shown.stdout == f"corral {wheel.version}\n"


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(make_wheel("1.2")) as fleet:
        yield fleet


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def joined(fleet: Fleet) -> str:
    return f"joined join {fleet.url} --token - {TOKEN}\n"


def test_one_line_installs_and_joins_and_the_next_one_only_joins(fleet: Fleet, machine: Machine) -> None:
    code, out, err = machine.run(fleet.line)
    assert (code, out) == (0, joined(fleet)), err
    machine.assert_installed(fleet.wheel)
    fleet.asked.clear()
    code, out, err = machine.run(f"{fleet.line} --name attic")
    assert (code, out) == (0, f"joined join {fleet.url} --token - --name attic {TOKEN}\n")
    assert "Corral 1.2 is here already" in err
    assert fleet.asked == ["/install.sh"]


Reached = Callable[[Path], bool]
STEPS: dict[str, Reached] = {
    "the folder is there": lambda version: version.exists(),
    "the environment is made": lambda version: (version / "pyvenv.cfg").exists(),
    "a wheel is half there": lambda version: any(version.glob("wheels/*.part")),
    "all wheels are there": lambda version: (version / "wheels" / PIP.name).exists(),
    "the package is installed": lambda version: any(version.glob("lib/*/site-packages/corral/__init__.py")),
    "the command is there": lambda version: (version / "bin" / "corral").exists(),
}


USUAL = ("a wheel is half there", "the package is installed")


@pytest.mark.parametrize(
    "step", [step if step in USUAL else pytest.param(step, marks=pytest.mark.long) for step in STEPS]
)
def test_killed_at_any_step_the_same_line_installs_it(fleet: Fleet, machine: Machine, step: str) -> None:
    if "half" in step:
        fleet.held = threading.Event()
    running = machine.start(fleet.line)
    try:
        wait_for(lambda: STEPS[step](machine.version(fleet.wheel)) or running.poll() is not None, step)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate(timeout=30)
    if fleet.held is not None:
        fleet.held.set()
        fleet.held = None
    code, out, err = machine.run(fleet.line)
    assert (code, out) == (0, joined(fleet)), err
    machine.assert_installed(fleet.wheel)


def test_another_version_stays_beside_the_new_one(machine: Machine) -> None:
    for number in ("1.2", "1.3"):
        with Fleet(make_wheel(number)) as fleet:
            code, _, err = machine.run(fleet.line)
            assert code == 0, err
            machine.assert_installed(fleet.wheel)
    assert len(list((machine.programs / "versions").iterdir())) == 2
    assert (
        subprocess.run([machine.version(make_wheel("1.2")) / "bin" / "corral", "--version"], timeout=30).returncode == 0
    )


def test_a_corral_of_somebody_else_is_not_replaced(fleet: Fleet, machine: Machine) -> None:
    other = machine.root / "bin" / "corral"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho other\n")
    code, _, err = machine.run(fleet.line)
    assert code == 0
    assert f"there is another {other}: it stays" in err
    assert "echo other" in other.read_text()


def test_a_proxy_is_not_asked_for_the_fleet(fleet: Fleet, machine: Machine) -> None:
    """The worker connects to the fleet directly too."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        machine.env |= {name: "http://127.0.0.1:9", name.upper(): "http://127.0.0.1:9"}
    code, out, err = machine.run(fleet.line)
    assert (code, out) == (0, joined(fleet)), err


def test_too_little_space_is_said_before_anything_is_downloaded(fleet: Fleet, machine: Machine) -> None:
    tools = machine.root / "tools"
    tools.mkdir()
    (tools / "df").write_text("#!/bin/sh\necho head\necho disk 1 1 99000 1% /\n")
    (tools / "df").chmod(0o755)
    path = machine.env["PATH"]
    machine.env["PATH"] = f"{tools}:{path}"
    code, out, err = machine.run(fleet.line)
    assert (code, out) == (1, "")
    assert "has 96 MiB of free space, 400 MiB are needed" in err
    assert fleet.asked == ["/install.sh"]
    machine.env["PATH"] = path
    assert machine.run(fleet.line)[0] == 0


def test_a_home_that_cannot_be_written_needs_another_folder(fleet: Fleet, machine: Machine) -> None:
    data = machine.env["CORRAL_DATA"]
    machine.env |= {"CORRAL_DATA": "/sys/home/data", "CORRAL_BIN": "/sys/home/bin"}
    code, out, err = machine.run(fleet.line)
    assert (code, out) == (1, "")
    assert "cannot write to /sys/home/data/corral: choose another folder with CORRAL_DATA=FOLDER" in err
    machine.env["CORRAL_DATA"] = data
    code, out, err = machine.run(fleet.line)
    assert (code, out) == (0, joined(fleet)), err
    assert f"cannot write to /sys/home/bin: the command is {machine.programs}/current/bin/corral" in err


@pytest.mark.parametrize("is_ours", [True, False])
def test_over_tls_only_the_ca_of_the_installer_is_trusted(machine: Machine, tmp_path: Path, is_ours: bool) -> None:
    ca = TestCa()
    fingerprint = "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(ca.pem)).hexdigest()
    context = ca.server_context(tmp_path)
    fleet = Fleet(make_wheel("1.2"), fingerprint if is_ours else "sha256:" + "0" * 64)
    fleet.ca_pem, fleet.scheme = ca.pem, "https"
    fleet.server.socket = context.wrap_socket(fleet.server.socket, server_side=True)
    with fleet:
        code, out, err = machine.run(fleet.line)
    if is_ours:
        assert (code, f"--ca {fingerprint}" in out) == (0, True), err
    else:
        assert (code, out) == (1, "")
        assert "is not the one of this installer: another machine answers in its place" in err
        assert fleet.asked == ["/install.sh", "/ca.pem"], "the token is not sent"
