"""A real fleet from outside: `corral up`, more workers, the CLI and the HTTP API, with short durations."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sqlite3
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import Any

from corral.client.contexts import config_folder
from tests.support.processes import CORRAL, Process, clean_env, free_port
from tests.support.waiting import wait_for

STALE_S = 4.0  # ten heartbeats and more: on a busy machine a process may stand still for a second or two
SHORT = {
    "CORRAL_HEARTBEAT_INTERVAL": "300ms",
    "CORRAL_STALE_AFTER": f"{STALE_S:g}s",
    "CORRAL_HEALTH_INTERVAL": "300ms",
    "CORRAL_HEARTBEAT_FLUSH": "200ms",
    "CORRAL_WATCH_INTERVAL": "200ms",
    "CORRAL_VIEW_INTERVAL": "1s",
    "CORRAL_LEASE_TTL": "2s",
    "CORRAL_INGRESS_CHECK_INTERVAL": "1s",
    "CORRAL_RETRY_FIRST": "200ms",
    "CORRAL_RETRY_CAP": "1s",
    "CORRAL_APPROVAL_POLL": "300ms",
    "CORRAL_RECONCILE_INTERVAL": "2s",
    "CORRAL_INVENTORY_INTERVAL": "1s",
    "CORRAL_PROGRESS_WRITE_INTERVAL": "300ms",
    "CORRAL_BACKEND_POLL": "50ms",
    "CORRAL_BACKEND_GRACE": "5s",
    "CORRAL_BACKEND_PORT_REST": "1s",
    "CORRAL_GALLERIES": "[]",  # the built-in one only: no test asks the world outside
    "CORRAL_MODEL_GALLERIES": "[]",
    "CORRAL_MODELS_FOLDER_INTERVAL": "200ms",
}
# Where nobody is meant to fall silent, and a single glance must find everybody there.
PATIENT = {"CORRAL_STALE_AFTER": "10m"}
TIMEOUT_S = 30.0  # of one request: a slow machine is no failure
START_S = 60.0  # several processes that start at once, each with all it imports


class Answer:
    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.status = status
        self.body = body
        self.headers = {name.lower(): value for name, value in headers.items()}

    def json(self) -> Any:
        return json.loads(self.body)


def http(
    method: str,
    url: str,
    *,
    key: str = "",
    body: object = None,
    headers: dict[str, str] | None = None,
    trust: ssl.SSLContext | None = None,
) -> Answer:
    """One request; statuses of refusal are answers too. Over https without `trust` the system's roots decide."""
    request = urllib.request.Request(url, method=method, headers=dict(headers or {}))
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        try:
            answer = urllib.request.urlopen(request, data=data, timeout=TIMEOUT_S, context=trust)
        except urllib.error.HTTPError as refusal:
            answer = refusal
        with answer:
            return Answer(answer.status, answer.read(), dict(answer.headers))
    except HTTPException as error:  # it died in the middle of its answer
        raise ConnectionError(f"{url}: {error!r}") from error


def refusal(ran: subprocess.CompletedProcess[str], *, code: int = 1) -> str:
    """What a person reads when a command refuses: exactly one line of ours, whatever was logged before it."""
    assert ran.returncode == code, f"exit code {ran.returncode}: {ran.stdout}{ran.stderr}"
    assert "Traceback" not in ran.stderr, ran.stderr
    lines = [line for line in ran.stderr.splitlines() if line.startswith("corral")]
    assert len(lines) == 1, ran.stderr
    return lines[0]


class Fleet:
    """One `corral up` and the workers that joined it. Everything is stopped by `close`."""

    def __init__(self, root: Path, *options: str, **env: str) -> None:
        self.root = root
        self.data = root / "data"
        self.port = free_port()
        self.bus_port = free_port()
        self.blob_port = free_port()  # its usual one is taken by whichever fleet of this machine comes first
        self.env = clean_env(root / "home", **(SHORT | env))
        self.options = options
        self.prefix: tuple[str, ...] = ()  # of every command: another machine, another user
        self.program: tuple[str, ...] = CORRAL
        self.workers: dict[str, Process] = {}
        self.started = 0
        self.up: Process | None = None

    @property
    def tls(self) -> bool:
        return "--lan" in self.options and "--plain" not in self.options

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def ca(self) -> Path:
        return self.data / "secrets" / "ca.crt"

    @property
    def trust(self) -> ssl.SSLContext | None:
        """The fleet's own CA and nobody else."""
        return ssl.create_default_context(cafile=str(self.ca)) if self.tls else None

    @property
    def key(self) -> str:
        return (self.data / "secrets" / "admin.key").read_text().strip()

    def start(self, *, wait: bool = True) -> Fleet:
        if self.up is not None:
            self.up.close()
        self.started += 1
        command = (
            *(*self.prefix, *self.program, "up"),
            *("--port", str(self.port), "--bus-port", str(self.bus_port), "--ingress-port", str(free_port())),
            *(() if "--blob-port" in self.options else ("--blob-port", str(self.blob_port))),
            *("--data", str(self.data), *self.options),
        )
        self.up = Process(command, self.env, self.root / f"up-{self.started}.log")
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, timeout_s: float = START_S) -> None:
        def ready() -> bool:
            assert self.up is not None
            assert self.up.running, self.up.output()
            return self.http("GET", "/readyz").status == 200 and self.controller_ready() and self.has_context()

        wait_for(ready, "ready fleet", timeout_s)

    def has_context(self) -> bool:
        """`corral up` writes it when all is ready; commands find the fleet by it."""
        return any((config_folder(self.env) / "contexts").glob("*.json"))

    def controller_ready(self) -> bool:
        return self.http("GET", "/controller/readyz").status == 200

    def http(self, method: str, path: str, *, key: str = "", body: object = None) -> Answer:
        return http(method, self.url + path, key=key, body=body, trust=self.trust)

    def api(self, method: str, path: str, body: object = None, *, key: str | None = None) -> Answer:
        return self.http(method, path, key=self.key if key is None else key, body=body)

    def cli(self, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, *self.program, *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def refused(self, *words: str, code: int = 1, timeout_s: float = 60.0) -> str:
        """The one line with which a command that cannot succeed leaves the person."""
        return refusal(self.cli(*words, timeout_s=timeout_s), code=code)

    def nodes(self) -> dict[str, dict[str, Any]]:
        answer = self.api("GET", "/api/nodes")
        assert answer.status == 200, answer.body
        return {node["name"]: node for node in answer.json()}

    def proven_ingresses(self) -> dict[str, bool | None]:
        """What the controller found out about each ingress; the API tells the bad news only."""
        with closing(sqlite3.connect(f"file:{self.data}/controller/corral.db?mode=ro", uri=True)) as database:
            found = database.execute("SELECT name, ingress_ok FROM nodes").fetchall()
        return {name: None if ok is None else bool(ok) for name, ok in found}

    def own_node(self) -> str:
        """The name of the node `up` itself brings."""
        return str(wait_for(lambda: next(iter(self.nodes()), ""), "node of our own"))

    def newcomer(self, *known: str, timeout_s: float = START_S) -> str:
        """The name of a node that is none of these."""
        return wait_for(lambda: next((name for name in self.nodes() if name not in known), ""), "new node", timeout_s)

    def status(self, name: str) -> str:
        return str(self.nodes()[name]["status"])

    def wait_status(self, name: str, status: str, timeout_s: float = START_S) -> dict[str, Any]:
        """The node as it was when it was so."""

        def look() -> dict[str, Any]:
            node = self.nodes()[name]
            assert node["status"] == status, node
            return node

        return wait_for(look, f"{status} node {name}", timeout_s)

    def token(self, *options: str) -> str:
        made = self.cli("token", "create", "--json", *options)
        assert made.returncode == 0, made.stderr
        return str(json.loads(made.stdout)["secret"])

    def join(self, name: str, *, token: str | None = None, options: tuple[str, ...] = (), **env: str) -> Process:
        """Start a worker with the join line; its data folder is its own and survives restarts."""
        run = sum(1 for known in self.workers if known.startswith(name))
        words = ["join", self.url, "--name", name, "--data", str(self.root / f"worker-{name}")]
        words += ["--port", str(free_port()), *options]
        if token:
            words += ["--token", token]
        if self.tls:
            words += ["--ca", str(self.ca)]
        log = self.root / f"worker-{name}-{run}.log"
        process = Process((*self.prefix, *self.program, *words), self.env | env, log)
        self.workers[f"{name}-{run}"] = process
        return process

    def printed_line(self) -> str:
        """The line `up` prints for another machine: in a LAN it installs Corral, else it starts with `corral join`."""

        def printed() -> str:
            assert self.up is not None
            found = re.search(r"^ +((?:corral join|printf %s cj_).+)$", self.up.output(), re.MULTILINE)
            assert found is not None, self.up.output()
            return found[1]

        return wait_for(printed, "join line")

    def join_line(self) -> str:
        """A line for a machine that has Corral."""
        line = self.printed_line()
        if line.startswith("corral join"):
            return line
        made = self.cli("token", "create", "--json")
        assert made.returncode == 0, made.stderr
        return str(json.loads(made.stdout)["join_command"])

    def paste(self, line: str, name: str, **env: str) -> Process:
        """Run a join line as it is, the data folder apart: two workers of one person need two."""
        told = {"CORRAL_DATA": str(self.root / f"pasted-{name}")} | env
        command = (*self.prefix, *self.program, *shlex.split(line)[1:])
        process = Process(command, self.env | told, self.root / f"pasted-{name}.log")
        self.workers[f"pasted {name}"] = process
        return process

    def child_pid(self, role: str) -> int:
        """The pid of one of `up`'s four children, found by its command line and its parent."""

        def find() -> int:
            assert self.up is not None
            for pid in _children(self.up.pid):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if role in line:
                    return pid
            raise KeyError(role)

        return wait_for(find, f"process of the {role}")

    @contextlib.contextmanager
    def restarts_suspended(self) -> Iterator[None]:
        """`corral up` stands still meanwhile, so that a child that was killed stays away."""
        assert self.up is not None
        os.kill(self.up.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.up.pid, signal.SIGCONT)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        if self.up is not None:
            self.up.close()


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(entry.name))
    return found
