"""The systems a bench compares, as processes on loopback: started, found healthy, stopped. Measures nothing itself."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.support.traffic import BODIES, HEADERS, KEY, nginx_upstream

HERE = Path(__file__).parent
NGINX = """worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000000;
  {inside}
}}
"""
PROXY = """upstream up {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; }} }}"""


@dataclass
class System:
    name: str
    port: int
    process: psutil.Process | None  # None: the upstream itself
    single: bool = False  # two systems in a row, there only for the latency of one connection
    behind: tuple[psutil.Process, ...] = ()  # the other hops of it, where it has more than one
    figures: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    latency_us: dict[str, list[float]] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """Spent so far by its process and the children of that."""
        if self.process is None:
            return 0.0
        all_of_it = (self.process, *self.process.children(recursive=True), *self.behind)
        times = [one.cpu_times() for one in all_of_it]
        return float(sum(spent.user + spent.system for spent in times))


@dataclass(frozen=True)
class Choice:
    """What to compare besides nginx and ourselves."""

    router: Path | None = None  # a Python that has sglang-router
    more: tuple[tuple[str, str], ...] = ()  # (name, command with {port}, {upstream} and {key})
    floor: bool = False  # the least a relay in Python can do; it knows no streams


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path, env: dict[str, str] | None = None) -> Iterator[psutil.Process]:
    """The command, until the block ends; entered when its port answers. `env`: more variables for it."""
    with log.open("ab") as out:
        popen = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **(env or {})})
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if popen.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-2000:]}") from None
                time.sleep(0.05)
        yield psutil.Process(popen.pid)
    finally:
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(5)
        popen.kill()
        popen.wait()


@contextlib.contextmanager
def nginx(folder: Path, inside: str, port: int) -> Iterator[psutil.Process]:
    folder.mkdir()
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, inside=inside))
    with running(["nginx", "-c", str(config), "-p", str(folder)], port, folder / "log") as master:
        deadline = time.monotonic() + 20
        while not (workers := master.children()):  # it listens before it starts them
            if time.monotonic() > deadline:
                raise SystemExit("nginx has started no worker")
            time.sleep(0.01)
        yield workers[0]  # its one worker does the work


@contextlib.contextmanager
def plain_upstream(folder: Path) -> Iterator[int]:
    """nginx answering from memory: as fast as an upstream can be."""
    port = free_port()
    with nginx(folder, nginx_upstream(port), port):
        yield port


@contextlib.contextmanager
def stream_upstream(folder: Path, pace_ms: int) -> Iterator[int]:
    port = free_port()
    command = [sys.executable, str(HERE / "streams.py"), "serve", str(port), "400", str(pace_ms)]
    with running(command, port, folder / "streams.log"):
        yield port


@contextlib.contextmanager
def systems(root: Path, upstream: int, choice: Choice) -> Iterator[list[System]]:
    """Everything that is compared, in front of one upstream."""
    with contextlib.ExitStack() as stack:

        def start(name: str, template: list[str], behind: int, *, single: bool = False) -> System:
            port = free_port()
            values = {"port": port, "upstream": f"127.0.0.1:{behind}", "key": KEY}
            command = [part.format(**values) for part in template]
            log = root / (name.replace(" ", "-") + ".log")
            return System(name, port, stack.enter_context(running(command, port, log)), single)

        port = free_port()
        inside = PROXY.format(port=port, upstream=upstream)
        relay = [sys.executable, str(HERE / "plain_proxy.py"), "{port}", "{upstream}"]
        bare = [sys.executable, str(HERE / "bare_relay.py"), "{port}", "{upstream}"]
        gateway = [sys.executable, str(HERE / "gateway_process.py"), "{port}", "{upstream}", "{key}"]
        found = [
            System("direct", upstream, None),
            System("nginx", port, stack.enter_context(nginx(root / "proxy", inside, port))),
            *([start("bare relay", bare, upstream)] if choice.floor else []),
            start("relay alone", relay, upstream),
            start("gateway", gateway, upstream),
        ]
        ingress = start("ingress", relay, upstream)
        found.append(start("gateway + relay", gateway, ingress.port, single=True))
        found += [start(name, shlex.split(command), upstream) for name, command in choice.more]
        if choice.router is not None:
            found.append(start("sglang-router", sglang_router(choice.router), upstream))
        for system in found:
            warm_up(system)
        yield found


def sglang_router(python: Path) -> list[str]:
    command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--worker-urls", "http://{upstream}", "--policy", "round_robin"]
    return [*command, "--prometheus-port", str(free_port()), "--log-level", "error"]


def warm_up(system: System) -> None:
    """Until it answers 200: a router first has to find its upstream healthy."""
    deadline = time.monotonic() + 60
    request = urllib.request.Request(f"http://127.0.0.1:{system.port}/v1/chat/completions", BODIES[0].encode())
    for name, value in HEADERS.items():
        request.add_header(name, value)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=15):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{system.name} does not answer with 200: {error}") from error
            time.sleep(0.2)


def install(requirement: str) -> Path | None:
    """A Python with this and nothing else of ours, in a cache folder, made by the first run that wants it; None, with a
    line that says so, where it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "corral-bench" / re.sub(r"\W+", "-", requirement).strip("-")
    python, whole = folder / "bin" / "python", folder / "whole"
    if whole.exists():
        return python
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
        command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", requirement]
        subprocess.run(command, check=True, timeout=900)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{requirement} cannot be installed here and is left out ({error})")
        return None
    whole.touch()
    return python
