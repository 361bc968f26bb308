"""The whole of Corral on one machine (`corral up`) beside nginx → nginx: one engine, one client, one process each.

Here are the systems and the processes of each, by what they do; `bench/models.py` measures and shows them.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.support.chat import WARM_UP_S, Asked
from bench.support.ingress import token
from bench.support.systems import HERE, PROXY, free_port, nginx, running
from bench.support.traffic import KEY, MODEL

CHAT = [sys.executable, str(HERE / "chat.py")]
CORRAL = Path(sys.executable).parent / "corral"
GALLERY = """- name: chat
  uri: {folder}
  corral:
    protocol: openai
    command: [{python}, chat.py, serve, "{{port}}"]
    ready: {{path: /v1/models, timeout_s: 30}}
    slots: 4096
"""
CLIENT, ENGINE = "client", "engine"
ROLES = {  # of the processes of `corral up`, by a part of their command
    "cli.main gateway": "gateway",
    "cli.main worker": "ingress",
    "cli.main controller": "controller",
    "nats-server": "bus",
    "chat.py serve": ENGINE,
}
_START_S = 120.0


@dataclass
class Whole:
    name: str
    port: int
    key: str
    processes: dict[str, psutil.Process]  # by what they do, the engine among them
    rates: dict[str, list[float]] = field(default_factory=dict)  # answers a second, by measure
    cpu_us: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # per answer, by measure and process

    def measure(self, label: str, connections: int, seconds: float, kind: str) -> None:
        command = [*CHAT, "ask", f"127.0.0.1:{self.port}", str(connections), f"{seconds:g}", kind, MODEL, self.key]
        before = {role: _cpu_s(process) for role, process in self.processes.items()}
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + WARM_UP_S + 60)
        asked = Asked(**json.loads(done.stdout))
        if asked.faults or not asked.answers:
            raise SystemExit(f"{self.name} failed {asked.faults} requests at {connections} connections")
        spent = {CLIENT: asked.cpu_s} | {role: _cpu_s(self.processes[role]) - was for role, was in before.items()}
        self.rates.setdefault(label, []).append(asked.rate)
        self.cpu_us.setdefault(label, []).append({role: 1e6 * cpu_s / asked.answers for role, cpu_s in spent.items()})

    def cpu_us_by_process(self, label: str) -> dict[str, float]:
        """Per answer: the lower quartile, because whatever disturbs a turn makes it dearer, never cheaper."""
        spent = self.cpu_us[label]
        return {role: _lower_quartile([one[role] for one in spent]) for role in spent[0]}


def _lower_quartile(values: list[float]) -> float:
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=4, method="inclusive")[0]


def _cpu_s(process: psutil.Process) -> float:
    """Of all its threads, by the scheduler's clock: a tick of the other one is too long for a second's measurement."""
    spent_ns = 0
    for place in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ended
            spent_ns += int((place / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


@contextlib.contextmanager
def engine(root: Path) -> Iterator[tuple[int, psutil.Process]]:
    port = free_port()
    with running([*CHAT, "serve", str(port)], port, root / "engine.log") as process:
        yield port, process


@contextlib.contextmanager
def two_nginx(root: Path) -> Iterator[Whole]:
    with contextlib.ExitStack() as stack:
        upstream, serving = stack.enter_context(engine(root))
        second, first = free_port(), free_port()
        inner = stack.enter_context(nginx(root / "second", PROXY.format(port=second, upstream=upstream), second))
        outer = stack.enter_context(nginx(root / "first", PROXY.format(port=first, upstream=second), first))
        yield Whole("nginx → nginx", first, KEY, {"1st hop": outer, "2nd hop": inner, ENGINE: serving})


@contextlib.contextmanager
def two_doors(root: Path) -> Iterator[Whole]:
    """Gateway and ingress with nobody who takes receipts: what the first table of the bench measures."""
    with contextlib.ExitStack() as stack:
        upstream, serving = stack.enter_context(engine(root))
        behind, port = free_port(), free_port()
        ingress = [sys.executable, str(HERE / "ingress.py"), str(behind), f"127.0.0.1:{upstream}"]
        gateway = [sys.executable, str(HERE / "gateway_process.py"), str(port), f"127.0.0.1:{behind}", KEY, token()]
        inner = stack.enter_context(running(ingress, behind, root / "ingress.log"))
        outer = stack.enter_context(running(gateway, port, root / "gateway.log"))
        yield Whole("gateway + ingress", port, KEY, {"gateway": outer, "ingress": inner, ENGINE: serving})


@contextlib.contextmanager
def corral_up_over_tcp(root: Path) -> Iterator[Whole]:
    """As a gateway reaches a worker on another machine, but on loopback."""
    with corral_up(root, "--no-ingress-socket") as whole:
        whole.name = "corral up, TCP"
        yield whole


@contextlib.contextmanager
def corral_up(root: Path, *flags: str) -> Iterator[Whole]:
    port, data, gallery, engines = free_port(), root / "data", root / "gallery", root / "engine"
    gallery.mkdir(parents=True)
    engines.mkdir()
    (engines / "chat.py").write_text((HERE / "chat.py").read_text())
    (gallery / "index.yaml").write_text(GALLERY.format(folder=engines, python=sys.executable))
    model = root / "model.yaml"
    model.write_text(f"name: {MODEL}\nbackend: chat\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")} | {
        "HOME": str(root),
        "XDG_CONFIG_HOME": str(root / "config"),
        "CORRAL_GALLERIES": json.dumps([{"name": "bench", "url": f"file://{gallery}/index.yaml"}]),
        "CORRAL_GALLERY_FOLDER": str(gallery),
        "CORRAL_MODEL_GALLERIES": "[]",
    }
    ports = ["--port", str(port), "--bus-port", str(free_port()), "--ingress-port", str(free_port())]
    with (root / "up.log").open("wb") as log:
        up = subprocess.Popen([CORRAL, "up", *ports, "--data", str(data), *flags], env=env, stdout=log, stderr=log)
    try:
        _wait_until_ready(port, up, root / "up.log")
        for words in (["models", "install", "-f", str(model)], ["chat", MODEL, "hello"]):
            subprocess.run([CORRAL, *words], env=env, check=True, capture_output=True, timeout=_START_S)
        processes = _by_role(psutil.Process(up.pid))
        yield Whole("corral up", port, (data / "secrets" / "admin.key").read_text().strip(), processes)
    finally:
        up.terminate()
        up.wait(60)


def _wait_until_ready(port: int, up: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2):
                return
        except OSError:
            if up.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"corral up did not start:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.2)


def _by_role(up: psutil.Process) -> dict[str, psutil.Process]:
    found: dict[str, psutil.Process] = {}
    for process in up.children(recursive=True):
        command = " ".join(process.cmdline())
        for part, role in ROLES.items():
            if part in command:
                found[role] = process  # the engine itself comes after the shim that started it
    return found
