"""What traces cost a gateway and an ingress: off (twice, which shows the spread), and at 1 % and 100 % of requests.

    scripts/bench traces [--seconds 3] [--rounds 9] [--connections 32]

Chat requests as in `scripts/bench gateway`, through a gateway and an ingress to nginx, which answers from memory; the
collector is an nginx that accepts everything. The four pairs take turns. Shown are medians of the CPU time per request,
building and sending spans included.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.gateway import wrk
from bench.support.ingress import token
from bench.support.systems import HERE, System, free_port, nginx, plain_upstream, running, warm_up
from bench.support.traffic import KEY

COLLECTOR = """server {{ listen 127.0.0.1:{port}; client_max_body_size 0; location / {{ return 200 '{{}}'; }} }}"""
SHARES = {"off": "", "off again": "", "1 %": "1%", "100 %": "100%"}


@contextlib.contextmanager
def pairs(root: Path, upstream: int, collector: int) -> Iterator[list[tuple[System, psutil.Process]]]:
    """For each share: the gateway, and the process of its ingress."""
    with contextlib.ExitStack() as stack:
        found = []
        for name, share in SHARES.items():
            env = {"CORRAL_TRACES_ENDPOINT": f"http://127.0.0.1:{collector}", "CORRAL_TRACES_SAMPLE": share}
            env = env if share else {}
            port, behind = free_port(), free_port()
            ingress = [sys.executable, str(HERE / "ingress.py"), str(behind), f"127.0.0.1:{upstream}"]
            gateway = [sys.executable, str(HERE / "gateway_process.py"), str(port), f"127.0.0.1:{behind}", KEY, token()]
            process = stack.enter_context(running(ingress, behind, root / f"ingress {name}.log", env))
            system = System(name, port, stack.enter_context(running(gateway, port, root / f"{name}.log", env)))
            warm_up(system)
            found.append((system, process))
        yield found


def cpu_s(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def measure(found: list[tuple[System, psutil.Process]], root: Path, connections: int, seconds: float) -> None:
    for system, ingress in found:
        before = system.cpu_s(), cpu_s(ingress)
        requests, rate, _ = wrk(system, root, connections=connections, seconds=seconds)
        system.figures.setdefault("requests/s", []).append(rate)
        system.cpu_us.setdefault("gateway", []).append((system.cpu_s() - before[0]) / requests * 1e6)
        system.cpu_us.setdefault("ingress", []).append((cpu_s(ingress) - before[1]) / requests * 1e6)


def show(found: list[tuple[System, psutil.Process]]) -> None:
    print("| CPU per request | " + " | ".join(SHARES) + " | " + " | ".join(f"{name} ÷ off" for name in SHARES) + " |")
    print("|---|" + "---:|" * (2 * len(SHARES)))
    for part in ("gateway", "ingress"):
        spent = {system.name: statistics.median(system.cpu_us[part]) for system, _ in found}
        cells = [f"{spent[name]:.1f} µs" for name in SHARES]
        cells += [f"{spent[name] / spent['off']:.3f}" for name in SHARES]
        print(f"| {part} | " + " | ".join(cells) + " |")
    rates = {system.name: statistics.median(system.figures["requests/s"]) for system, _ in found}
    print("| requests/s | " + " | ".join(f"{rates[name]:,.0f}" for name in SHARES) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3, help="of each single measurement")
    parser.add_argument("--rounds", type=int, default=9, help="each pair takes its turn so often")
    parser.add_argument("--connections", type=int, default=32)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        root = Path(folder)
        collector = free_port()
        with (
            plain_upstream(root / "upstream") as upstream,
            nginx(root / "collector", COLLECTOR.format(port=collector), collector),
            pairs(root, upstream, collector) as found,
        ):
            for _ in range(chosen.rounds):
                measure(found, root, chosen.connections, chosen.seconds)
            show(found)


if __name__ == "__main__":
    main()
