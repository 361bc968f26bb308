"""Supervisors in tests: short durations, a tiny backend that starts at once, the mock, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from corral.contract.manifest import LOCALAI, Manifest, Ready
from corral.worker.settings.processes import ProcessSettings
from corral.worker.supervisor.identity import Identity, kill_leftovers
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.states import RestartPolicy
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.system.users import BackendUser

ROOT = Path(__file__).parents[2]
MOCK = ROOT / "backends" / "mock"
QUICK = RestartPolicy(first_s=0.05, cap_s=0.2, calm_s=60)

# Standard library only, without `site`: up in a twentieth of a second, where the mock needs one.
TINY = """
import http.server, json, os, signal, subprocess, sys, time
host, port = sys.argv[1], int(sys.argv[2])
want = dict(word.split("=", 1) for word in os.environ.get("TINY", "").split())
for number in range(int(want.get("lines", 0))):
    print(f"tiny line {number + 1}", file=sys.stderr, flush=True)
if "crash" in want:
    sys.exit(int(want["crash"]))
if "deaf" in want:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in range(int(want.get("children", 0))):
    subprocess.Popen(["sleep", "3600"], start_new_session=number == 1)
if "silent" in want:
    time.sleep(3600)
for number in range(int(want.get("slow", 0))):
    print("still loading", flush=True)
    time.sleep(0.1)
while "when" in want and not os.path.exists(want["when"]):
    time.sleep(0.02)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_GET(self):
        if self.path.startswith("/say/"):
            print(self.path[5:], file=sys.stderr, flush=True)
        if self.path.startswith("/take/"):
            time.sleep(float(self.path[6:]))
        if self.path.startswith("/when/"):  # there is such a file; another one tells that we were asked
            open(self.path[5:] + ".asked", "w").close()
            while not os.path.exists(self.path[5:]):
                time.sleep(0.01)
        if self.path == "/exit":
            os._exit(7)
        seen = {"pid": os.getpid(), "authorization": self.headers.get("Authorization", "")}
        seen |= {name: self.headers[name] for name in ("traceparent", "tracestate") if name in self.headers}
        body = json.dumps(seen).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status = int(want.get("post", 200))
        if status < 100:
            print("cannot be asked", file=sys.stderr, flush=True)
            os._exit(status)
        if status == 200:
            return self.do_GET()
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer((host, port), Handler).serve_forever()
"""


def make_supervisor(
    folder: Path, *, user: str = "", environ: dict[str, str] | None = None, **changed: Any
) -> Supervisor:
    """A supervisor with short durations; `changed` are settings of processes without their prefix `backend_`."""
    quick: dict[str, Any] = {"poll_s": 0.02, "free_timeout_s": 20.0, "grace_s": 5.0, "kill_wait_s": 5.0}
    settings = {f"backend_{name}": value for name, value in (quick | changed).items()}
    return Supervisor(ProcessSettings(**settings), folder, user=BackendUser(user), environ=environ)


def tiny(folder: Path, want: str = "", **changed: Any) -> ProcessSpec:
    """An openai backend. `want` is what it should do: lines=3 crash=1 deaf=1 children=2 silent=1 slow=5 when=FILE."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.py").write_text(TINY)
    manifest = Manifest(
        protocol="openai",
        command=(sys.executable, "-I", "-S", "tiny.py", "{host}", "{port}"),
        ready=Ready(path="/health", timeout_s=changed.pop("patience_s", 20.0)),
    )
    env = {"TINY": want} | changed.pop("env", {})
    told: dict[str, Any] = {"backend": "tiny", "model": "m", "restart": QUICK} | changed
    return ProcessSpec(directory=str(folder), manifest=manifest, env=env, **told)


def mock_manifest() -> Manifest:
    """As the built-in gallery has it."""
    entries = yaml.safe_load((ROOT / "src" / "corral" / "gallery" / "backends" / "builtin.yaml").read_text())
    (entry,) = [entry for entry in entries if entry["name"] == "mock"]
    return msgspec.convert(entry["corral"], Manifest)


def mock_openai(**changed: Any) -> ProcessSpec:
    told: dict[str, Any] = {"backend": "mock", "model": "m", "restart": QUICK} | changed
    return ProcessSpec(directory=str(MOCK), manifest=mock_manifest(), **told)


def mock_grpc(**changed: Any) -> ProcessSpec:
    told: dict[str, Any] = {"backend": "mock", "model": "m", "restart": QUICK} | changed
    return ProcessSpec(directory=str(MOCK), manifest=LOCALAI, **told)


def get(port: int, path: str = "/", timeout_s: float = 20.0, token: str = "") -> dict[str, Any]:
    """What a backend answers; an OSError when it does not."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return dict(msgspec.json.decode(answer.read()))
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"{error.code}") from error


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def identities(folder: Path) -> list[Identity]:
    found = (Identity.read(path) for path in folder.iterdir()) if folder.exists() else iter(())
    return [identity for identity in found if identity is not None]


@contextlib.contextmanager
def swept(folder: Path) -> Iterator[None]:
    """Whatever a test leaves in a supervisor's folder is ended afterwards, whoever its parent is by then."""
    try:
        yield
    finally:
        for identity in identities(folder):
            if _is_shim_of(identity, folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(identity.shim_pid, signal.SIGKILL)
                kill_leftovers(identity)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(identity.shim_pid, 0)


def _is_shim_of(identity: Identity, folder: Path) -> bool:
    """Tests write states that name anybody, this very process too."""
    try:
        words = Path(f"/proc/{identity.shim_pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(folder / identity.process_id).encode() in words
