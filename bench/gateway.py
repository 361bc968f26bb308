"""The gateway beside nginx and a Rust router, in front of the same upstream, in one run: ratios, not seconds.

    scripts/bench gateway [--seconds 3] [--rounds 3] [--without-router]

Plain requests: a small chat request over keep-alive connections (wrk), the upstream is nginx answering from memory.
Streams: 256 open streams, 20 ms per chunk and as fast as it goes, from and to bare asyncio protocols. Every system is
one process on this machine's loopback; systems take turns, and medians are shown. CPU is the proxy's own, per request.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).parent
KEY = "ck_" + "b" * 52
CHAT = '{"model":"bench","messages":[{"role":"user","content":"Tell me about corrals."}]}'
WRK_SCRIPT = """wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer %s"
wrk.body = '%s'
done = function(summary, latency)
  io.write(string.format("RESULT %%d %%d %%f\\n", summary.requests, summary.duration, latency:percentile(50)))
  io.write(string.format("FAULTS %%d\\n", summary.errors.status + summary.errors.read + summary.errors.connect))
end
"""
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
ANSWER = (
    '{"id":"c","object":"chat.completion","model":"bench","choices":[{"index":0,"message":'
    '{"role":"assistant","content":"A corral keeps things together."},"finish_reason":"stop"}],'
    '"usage":{"prompt_tokens":9,"completion_tokens":7,"total_tokens":16}}'
)
UPSTREAM = """server {{ listen 127.0.0.1:{port} backlog=4096; default_type application/json;
    location / {{ return 200 '{answer}'; }} }}"""
PROXY = """upstream up {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; }} }}"""


@dataclass
class System:
    name: str
    port: int
    process: psutil.Process | None  # None: the upstream itself
    figures: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    latency_us: dict[str, list[float]] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[psutil.Process]:
    """The command, until the block ends; entered when its port answers."""
    with log.open("ab") as out:
        popen = subprocess.Popen(command, stdout=out, stderr=out)
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
        yield master.children()[0]  # its one worker does the work


@contextlib.contextmanager
def systems(root: Path, upstream: int, router: Path | None) -> Iterator[list[System]]:
    """Everything that is compared, in front of one upstream."""
    with contextlib.ExitStack() as stack:
        found = [System("direct", upstream, None)]
        port = free_port()
        inside = PROXY.format(port=port, upstream=upstream)
        found.append(System("nginx", port, stack.enter_context(nginx(root / "proxy", inside, port))))
        for name, script, more in (("relay alone", "plain_proxy.py", []), ("gateway", "gateway_door.py", [KEY])):
            port = free_port()
            command = [sys.executable, str(HERE / "support" / script), str(port), f"127.0.0.1:{upstream}", *more]
            found.append(System(name, port, stack.enter_context(running(command, port, root / f"{script}.log"))))
        if router is not None:
            port = free_port()
            command = [str(router), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--worker-urls", f"http://127.0.0.1:{upstream}", "--policy", "round_robin"]
            command += ["--prometheus-port", str(free_port()), "--log-level", "error"]
            process = stack.enter_context(running(command, port, root / "router.log"))
            found.append(System("sglang-router", port, process))
        for system in found:
            warm_up(system)
        yield found


def cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


def warm_up(system: System) -> None:
    """Until it answers 200: a router first has to find its upstream healthy."""
    deadline = time.monotonic() + 60
    request = urllib.request.Request(f"http://127.0.0.1:{system.port}/v1/chat/completions", CHAT.encode())
    request.add_header("Content-Type", "application/json")
    request.add_header("Authorization", f"Bearer {KEY}")
    while True:
        try:
            with urllib.request.urlopen(request, timeout=15):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{system.name} does not answer with 200: {error}") from error
            time.sleep(0.2)


def wrk(system: System, root: Path, *, connections: int, seconds: float) -> tuple[float, int, float]:
    script = root / "chat.lua"
    script.write_text(WRK_SCRIPT % (KEY, CHAT))
    url = f"http://127.0.0.1:{system.port}/v1/chat/completions"
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(script), url]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 30).stdout
    requests, micros, p50 = re.findall(r"RESULT (\d+) (\d+) ([\d.]+)", said)[0]
    faults = int(re.findall(r"FAULTS (\d+)", said)[0])
    return int(requests) / (int(micros) / 1e6), faults, float(p50)


def measure_plain(found: list[System], root: Path, seconds: float) -> None:
    for connections in (1, 32, 256):
        label = f"req/s, {connections} conn."
        for system in found:
            before = cpu_s(system.process)
            rate, faults, p50 = wrk(system, root, connections=connections, seconds=seconds)
            if faults:
                raise SystemExit(f"{system.name} failed {faults} requests at {connections} connections")
            spent = (cpu_s(system.process) - before) / max(rate * seconds, 1) * 1e6
            system.figures.setdefault(label, []).append(rate)
            system.cpu_us.setdefault(label, []).append(spent)
            system.latency_us.setdefault(label, []).append(p50)


def measure_streams(found: list[System], label: str, seconds: float) -> None:
    for system in found:
        command = [sys.executable, str(HERE / "support" / "streams.py"), "read", f"127.0.0.1:{system.port}", "256"]
        said = subprocess.run(
            [*command, f"{seconds:g}", KEY], capture_output=True, text=True, check=True, timeout=seconds + 60
        )
        system.figures.setdefault(label, []).append(float(said.stdout))


def show(found: list[System]) -> None:
    labels = list(dict.fromkeys(label for system in found for label in system.figures))
    print("| measure | " + " | ".join(system.name for system in found) + " | gateway ÷ nginx |")
    print("|---|" + "---:|" * (len(found) + 1))
    by_name = {system.name: system for system in found}
    for label in labels:
        cells = [f"{statistics.median(system.figures[label]):,.0f}" for system in found]
        ours, theirs = by_name["gateway"].figures[label], by_name["nginx"].figures[label]
        ratio = statistics.median(ours) / statistics.median(theirs)
        print(f"| {label} | " + " | ".join(cells) + f" | {ratio:.2f} |")
    for label in [label for label in labels if label in by_name["nginx"].cpu_us]:
        cells = [f"{statistics.median(s.cpu_us[label]):.0f} µs" if s.process else "" for s in found]
        ratio = statistics.median(by_name["gateway"].cpu_us[label]) / statistics.median(by_name["nginx"].cpu_us[label])
        print(f"| CPU per request, {label.split(', ')[1]} | " + " | ".join(cells) + f" | {ratio:.2f} |")
    p50 = {s.name: statistics.median(s.latency_us["req/s, 1 conn."]) for s in found if s.latency_us}
    if p50:
        cells = [f"{p50[system.name]:.0f} µs" for system in found]
        added_ms = (p50["gateway"] - p50["direct"]) / 1000
        print("| p50, 1 conn. | " + " | ".join(cells) + f" | +{added_ms:.2f} ms on direct |")


def install_router(folder: Path) -> Path | None:
    """In a throw-away environment; None, with a line that says so, where it cannot be had."""
    python = folder / "router" / "bin" / "python"
    try:
        subprocess.run(["uv", "venv", "-q", str(folder / "router")], check=True, timeout=120)
        install = ["uv", "pip", "install", "-q", "--python", str(python), "sglang-router"]
        subprocess.run(install, check=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"sglang-router cannot be installed here and is left out ({error})")
        return None
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each single measurement")
    parser.add_argument("--rounds", type=int, default=3, help="each system takes its turn so often")
    parser.add_argument("--without-router", action="store_true", help="leave sglang-router out")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        root = Path(folder)
        router = None if chosen.without_router else install_router(root)
        upstream = free_port()
        answer = UPSTREAM.format(port=upstream, answer=ANSWER)
        with nginx(root / "upstream", answer, upstream), systems(root, upstream, router) as found:
            for _ in range(chosen.rounds):
                measure_plain(found, root, chosen.seconds)
            show(found)
        for label, pace_ms in (("chunks/s, 256 streams, 20 ms each", 20), ("chunks/s, 256 streams, unpaced", 0)):
            place = root / f"streams-{pace_ms}"
            place.mkdir()
            upstream = free_port()
            command = [
                sys.executable,
                str(HERE / "support" / "streams.py"),
                "serve",
                str(upstream),
                "400",
                str(pace_ms),
            ]
            with running(command, upstream, place / "log"), systems(place, upstream, router) as found:
                for _ in range(chosen.rounds):
                    measure_streams(found, label, chosen.seconds)
                show(found)


if __name__ == "__main__":
    main()
