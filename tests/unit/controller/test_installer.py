"""The join line for a bare machine, run by real shells, and the script that fetches the wheels."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from corral.controller.distribution import fetch_wheels
from corral.controller.distribution.installer import install_command, make_installer
from corral.controller.distribution.own_wheel import OwnWheel

WHEEL = OwnWheel("corral-1.2-py3-none-any.whl", "1.2", b"", "ab" * 32)
TOKEN = "cj_secretsecretsecret"
URL = "https://fleet.example:8080"
SHELLS = [shell for shell in ("dash", "bash") if shutil.which(shell)]


def downloads(folder: Path, text: str | None) -> dict[str, str]:
    """An environment whose curl writes this text, or fails."""
    folder.mkdir(exist_ok=True)
    source = folder / "served"
    if text is not None:
        source.write_text(text)
    curl = folder / "curl"
    curl.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {source} "$2"\n')
    wget = folder / "wget"
    wget.write_text("#!/bin/sh\nexit 4\n")
    for program in (curl, wget):
        program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "TMPDIR": str(folder)}


def run_line(shell: str, line: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([shell, "-c", line], env=env, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_checked_installer_gets_the_token_on_standard_input(tmp_path: Path, shell: str) -> None:
    served = 'echo "args: $*"\necho "stdin: $(cat)"\ntr "\\0" " " </proc/$$/cmdline\n'
    line = install_command(URL, hashlib.sha256(served.encode()).hexdigest(), TOKEN)
    ran = run_line(shell, f"{line} --name attic", downloads(tmp_path / "bin", served))
    arguments, stdin, seen_by_others = ran.stdout.splitlines()
    assert arguments == f"args: {URL} --name attic"
    assert stdin == f"stdin: {TOKEN}"
    assert TOKEN not in seen_by_others


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("served", ["echo run\n", None])
def test_another_installer_or_none_runs_nothing(tmp_path: Path, shell: str, served: str | None) -> None:
    ran = run_line(shell, install_command(URL, "0" * 64, TOKEN), downloads(tmp_path / "bin", served))
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.endswith(
        f"corral: {URL}/install.sh could not be downloaded, or is not the one of this command: nothing was run\n"
    )
    assert not list((tmp_path / "bin").glob("tmp.*")), "nothing stays behind"


def test_an_address_with_brackets_stays_one_word(tmp_path: Path) -> None:
    served = 'echo "$1"\n'
    line = install_command("http://[fd00::1]:8080", hashlib.sha256(served.encode()).hexdigest(), TOKEN)
    assert run_line("sh", line, downloads(tmp_path / "bin", served)).stdout == "http://[fd00::1]:8080\n"


def test_the_installer_is_the_same_for_all_and_has_no_secret() -> None:
    one, two = make_installer(WHEEL, "sha256:" + "cd" * 32), make_installer(WHEEL, "sha256:" + "cd" * 32)
    assert one == two
    assert one.sha256 == hashlib.sha256(one.text.encode()).hexdigest()
    assert WHEEL.sha256 in one.text
    assert "@" not in one.text.replace("$@", "").replace("corral @ ", "").replace('"@', "")
    for shell in SHELLS:
        subprocess.run([shell, "-n"], input=one.text, text=True, timeout=30, check=True)


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        (None, "Python 3.11 or later is needed: install it"),
        ("3.9.2", "Python 3.11 or later is needed, "),
        ("no venv", "has no venv module: install it (Debian and Ubuntu: apt-get install python3-venv)"),
    ],
)
def test_a_machine_without_a_usable_python_is_told_what_to_install(
    tmp_path: Path, python: str | None, sentence: str
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "cat", "id", "rm", "mkdir", "dirname", "df", "awk", "cut", "printf"):
        (tools / name).symlink_to(shutil.which(name) or name)
    if python is not None:
        answers = "exit 1" if python != "no venv" else 'case "$2" in *venv*) exit 1;; esac'
        fake = tools / "python3"
        fake.write_text(f'#!/bin/sh\ncase "$2" in *platform*) echo {python}; exit 0;; esac\n{answers}\n')
        fake.chmod(0o755)
    installer = tmp_path / "install.sh"
    installer.write_text(make_installer(WHEEL, "").text)
    ran = subprocess.run(
        [str(tools / "sh"), str(installer), URL],
        env={"PATH": str(tools), "HOME": str(tmp_path), "CORRAL_DATA": str(tmp_path / "data")},
        input=TOKEN,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ran.returncode == 1
    assert sentence in ran.stderr
    assert TOKEN not in ran.stderr


# The script that fetches the wheels

Answers = dict[str, Callable[[], tuple[int, bytes]]]


@pytest.fixture
def answers() -> Answers:
    return {}


@pytest.fixture
def controller(answers: Answers) -> Iterator[str]:
    """A controller that gives these answers, by path; every call needs the token."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = 404, b'{"error": {"message": "there is no such path"}}'
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                status, body = 401, b'{"error": {"message": "the join token is used up"}}'
            elif (answer := answers.get(self.path.partition("?")[0])) is not None:
                status, body = answer()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(controller: str, own: OwnWheel, target: Path, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-I", "-S", fetch_wheels.__file__]
    return subprocess.run(
        [*program, controller, "", own.name, own.sha256, str(target)],
        input=token,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={"PATH": os.environ["PATH"], "CORRAL_INSTALL_PAUSE": "0.01"},
    )


def own_wheel(dependency: bytes) -> OwnWheel:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("corral/_requirements.txt", f"dep==1 --hash=sha256:{sha256(dependency)}\n")
        archive.writestr("corral/_pip.txt", "pip==1 --hash=sha256:" + "9" * 64 + "\n")
    data = buffer.getvalue()
    return OwnWheel("corral-1.2-py3-none-any.whl", "1.2", data, sha256(data))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def listing(*wheels: tuple[str, bytes]) -> Callable[[], tuple[int, bytes]]:
    rows = [{"name": name, "sha256": sha256(data)} for name, data in wheels]
    return lambda: (200, json.dumps({"wheels": rows, "ready": True}).encode())


def serve(answers: Answers, own: OwnWheel, dependency: bytes, name: str = "dep-1-py3-none-any.whl") -> None:
    answers[f"/install/wheels/{own.sha256}"] = lambda: (200, own.data)
    answers[f"/install/wheels/{sha256(dependency)}"] = lambda: (200, dependency)
    answers["/install/wheels"] = listing((name, dependency))


def test_all_wheels_are_fetched_and_listed_with_their_hashes(controller: str, answers: Answers, tmp_path: Path) -> None:
    own = own_wheel(b"dependency")
    serve(answers, own, b"dependency")
    ran = fetch(controller, own, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "dep-1-py3-none-any.whl").read_bytes() == b"dependency"
    first = (tmp_path / "requirements.txt").read_text().splitlines()[0]
    assert first == f"corral @ file://{tmp_path}/{own.name} --hash=sha256:{own.sha256}"
    asked: list[str] = []
    answers[f"/install/wheels/{own.sha256}"] = lambda: asked.append("own") or (500, b"")  # type: ignore[func-returns-value]
    assert fetch(controller, own, tmp_path).returncode == 0
    assert asked == [], "what is there is not fetched again"


def test_a_wheel_with_another_hash_is_refused(controller: str, answers: Answers, tmp_path: Path) -> None:
    own = own_wheel(b"dependency")
    serve(answers, own, b"dependency")
    answers[f"/install/wheels/{sha256(b'dependency')}"] = lambda: (200, b"something else")
    ran = fetch(controller, own, tmp_path)
    assert ran.returncode == 1
    assert "arrived 5 times with another SHA-256" in ran.stderr
    assert not (tmp_path / "dep-1-py3-none-any.whl").exists()


def test_a_package_that_is_not_locked_is_refused(controller: str, answers: Answers, tmp_path: Path) -> None:
    own = own_wheel(b"dependency")
    serve(answers, own, b"not locked")
    ran = fetch(controller, own, tmp_path)
    assert ran.returncode == 1
    assert "dep-1-py3-none-any.whl is not among the locked packages" in ran.stderr


@pytest.mark.parametrize("name", ["../dep-1-py3-none-any.whl", "/etc/dep.whl", "dep.tar.gz"])
def test_a_name_cannot_lead_out_of_the_folder(controller: str, answers: Answers, tmp_path: Path, name: str) -> None:
    own = own_wheel(b"dependency")
    serve(answers, own, b"dependency", name)
    ran = fetch(controller, own, tmp_path / "wheels")
    assert ran.returncode == 1
    assert "the controller names a package" in ran.stderr
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "corral-1.2-py3-none-any.whl",
        "requirements.txt",
    ]


def test_a_controller_without_packages_leads_to_the_index(controller: str, answers: Answers, tmp_path: Path) -> None:
    own = own_wheel(b"dependency")
    serve(answers, own, b"dependency")
    answers["/install/wheels"] = lambda: (502, b'{"error": {"message": "the index does not answer"}}')
    ran = fetch(controller, own, tmp_path)
    assert ran.returncode == 3
    assert "the controller cannot provide the packages (the index does not answer)" in ran.stderr
    assert (tmp_path / own.name).read_bytes() == own.data


def test_a_used_token_is_explained(controller: str, answers: Answers, tmp_path: Path) -> None:
    own = own_wheel(b"dependency")
    serve(answers, own, b"dependency")
    ran = fetch(controller, own, tmp_path, token="cj_other")
    assert ran.returncode == 1
    assert "the join token is used up" in ran.stderr


def test_an_unreachable_controller_is_named(tmp_path: Path) -> None:
    ran = fetch("http://127.0.0.1:9", own_wheel(b"dependency"), tmp_path)
    assert ran.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached: " in ran.stderr
