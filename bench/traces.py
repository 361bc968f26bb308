"""What traces cost a gateway and an ingress: off (twice, which shows the spread), and at 1 % and 100 % of requests.

    scripts/bench traces [--seconds 1] [--rounds 6] [--starts 5] [--connections 32]

Chat requests as in `scripts/bench gateway`, through a gateway and an ingress to nginx, which answers from memory; the
collector is an nginx that accepts everything. The four pairs take turns, in another order in each round, and are
started anew several times: two processes of the same program differ by several percent for as long as they live. Shown
are medians of the CPU time per request, building and sending spans included, with the range over the starts.
"""

from __future__ import annotations

import argparse
import contextlib
import random
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


def cpu_s(process: psutil.Process | None) -> float:
    """Of its one thread, to the nanosecond: `cpu_times` counts in steps of 10 ms."""
    assert process is not None
    return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9


Figures = dict[str, dict[str, list[float]]]  # by part and share: of each start


def measure(found: list[tuple[System, psutil.Process]], root: Path, connections: int, seconds: float) -> None:
    for system, ingress in random.sample(found, len(found)):
        before = cpu_s(system.process), cpu_s(ingress)
        requests, _, _ = wrk(system, root, connections=connections, seconds=seconds)
        system.cpu_us.setdefault("gateway", []).append((cpu_s(system.process) - before[0]) / requests * 1e6)
        system.cpu_us.setdefault("ingress", []).append((cpu_s(ingress) - before[1]) / requests * 1e6)


def add(figures: Figures, found: list[tuple[System, psutil.Process]]) -> None:
    for part in ("gateway", "ingress"):
        for system, _ in found:
            spent = statistics.median(system.cpu_us[part])
            figures.setdefault(part, {}).setdefault(system.name, []).append(spent)


def show(figures: Figures) -> None:
    print("| CPU per request | " + " | ".join(SHARES) + " | " + " | ".join(f"{name} ÷ off" for name in SHARES) + " |")
    print("|---|" + "---:|" * (2 * len(SHARES)))
    for part, spent in figures.items():
        middle = {name: statistics.median(each) for name, each in spent.items()}
        cells = [f"{middle[name]:.1f} µs ({min(spent[name]):.1f} to {max(spent[name]):.1f})" for name in SHARES]
        cells += [f"{middle[name] / middle['off']:.3f}" for name in SHARES]
        print(f"| {part} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=1, help="of each single measurement")
    parser.add_argument("--rounds", type=int, default=6, help="each pair takes its turn so often after each start")
    parser.add_argument("--starts", type=int, default=5, help="of new processes")
    parser.add_argument("--connections", type=int, default=32)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        root = Path(folder)
        collector = free_port()
        with (
            plain_upstream(root / "upstream") as upstream,
            nginx(root / "collector", COLLECTOR.format(port=collector), collector),
        ):
            figures: Figures = {}
            for _ in range(chosen.starts):
                with pairs(root, upstream, collector) as found:
                    for _ in range(chosen.rounds):
                        measure(found, root, chosen.connections, chosen.seconds)
                    add(figures, found)
            show(figures)


if __name__ == "__main__":
    main()
