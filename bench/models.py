"""Requests for models, all the way: gateway and ingress in front of a fast fake engine, beside what others put there.

    scripts/bench models [--seconds 1] [--rounds 8] [--streams N] [--without NAME ...] [--only-whole-system]
                        [--over-tcp]

Three parts. Systems take turns, many short ones, because machines are not equally fast all the time, and medians are
shown.

1. The whole system: `corral up`, where a controller takes a receipt of every request and writes it to SQLite, beside
nginx → nginx, with an engine and a client in Python, one process each (`support/chat.py`). Plain chat requests with
four headers and small bodies, and streams of 64 chunks, each written by itself, over 1, 32 and 256 connections.
"gateway + ingress" is the same without a controller, over TCP; `--over-tcp` adds a `corral up` whose gateway reaches
the worker over TCP. The target is 0.8 of nginx → nginx in every row. Then the CPU of
each process per request.

2. The proxies alone: the gateway's handler with keys, limits, choice of a replica and receipts that are dropped, and
the worker's ingress with signed tokens and its table of processes; the client is wrk, the upstream of plain requests
nginx. Beside them nginx → nginx, two hops of the leanest proxy there is; sglang-router, a router for engines in Rust,
and LiteLLM's proxy, in Python as we are, each one hop. CPU is that of all hops of a system, per request or per chunk.
Targets: 0.7 of nginx → nginx, 1.5 of sglang-router. LiteLLM gets plain requests over 32 connections only: with 256 it
answers hardly any of them in time, and it reads streams, which these here are not written for. These rows look better
than those of the first part; docs/reference/performance.md says why, with numbers.

3. A thousand open streams: what gateway and ingress hold in memory; the target is below 300 MB.

On a machine that does other things too only the CPU means something.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench.gateway import STREAMS, wrk
from bench.support.ingress import token
from bench.support.systems import (
    HERE,
    PROXY,
    System,
    free_port,
    install,
    nginx,
    plain_upstream,
    running,
    sglang_router,
    stream_upstream,
    warm_up,
)
from bench.support.traffic import KEY, MODEL
from bench.support.whole_system import Whole, corral_up, corral_up_over_tcp, two_doors, two_nginx

OURS, NGINX, ROUTER, LITELLM = "gateway + ingress", "nginx → nginx", "sglang-router", "LiteLLM"
MOST_FOR_LITELLM = 32
WHOLE_TARGET = "≥ 0.8"
RATIOS = ((NGINX, "≥ 0.7"), (ROUTER, "≥ 1.5"), (LITELLM, ""))
LITELLM_CONFIG = """model_list:
- model_name: {model}
  litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{upstream}/v1", api_key: none}}
general_settings: {{master_key: {key}, dangerously_permit_weak_or_unset_master_key: true}}
"""


@dataclass(frozen=True)
class Others:
    router: Path | None  # Pythons that have them
    litellm: Path | None


@contextlib.contextmanager
def our_way(root: Path, upstream: int) -> Iterator[tuple[int, psutil.Process, psutil.Process]]:
    """The gateway's port, its process, and the ingress's."""
    ingress_port, port = free_port(), free_port()
    ingress = [sys.executable, str(HERE / "ingress.py"), str(ingress_port), f"127.0.0.1:{upstream}"]
    gateway = [sys.executable, str(HERE / "gateway_process.py"), str(port), f"127.0.0.1:{ingress_port}", KEY, token()]
    with (
        running(ingress, ingress_port, root / "ingress.log") as behind,
        running(gateway, port, root / "gateway.log") as front,
    ):
        yield port, front, behind


@contextlib.contextmanager
def systems(root: Path, upstream: int, others: Others) -> Iterator[list[System]]:
    with contextlib.ExitStack() as stack:

        def start(name: str, template: list[str]) -> System:
            port = free_port()
            command = [part.format(port=port, upstream=f"127.0.0.1:{upstream}") for part in template]
            return System(name, port, stack.enter_context(running(command, port, root / f"{name}.log")))

        second, first = free_port(), free_port()
        inner = stack.enter_context(nginx(root / "second", PROXY.format(port=second, upstream=upstream), second))
        outer = stack.enter_context(nginx(root / "first", PROXY.format(port=first, upstream=second), first))
        port, gateway, ingress = stack.enter_context(our_way(root, upstream))
        found = [
            System("direct", upstream, None),
            System(NGINX, first, outer, behind=(inner,)),
            System(OURS, port, gateway, behind=(ingress,)),
        ]
        if others.router is not None:
            found.append(start(ROUTER, sglang_router(others.router)))
        if others.litellm is not None:
            config = root / "litellm.yaml"
            config.write_text(LITELLM_CONFIG.format(model=MODEL, upstream=upstream, key=KEY))
            tool = str(others.litellm.parent / "litellm")
            found.append(start(LITELLM, [tool, "--config", str(config), "--host", "127.0.0.1", "--port", "{port}"]))
        for system in found:
            warm_up(system)
        yield found


def measure_plain(found: list[System], root: Path, seconds: float) -> None:
    for connections in (32, 256):
        label = f"req/s, {connections} conn."
        for system in found:
            if system.name == LITELLM and connections > MOST_FOR_LITELLM:
                continue
            before = system.cpu_s()
            requests, rate, _ = wrk(system, root, connections=connections, seconds=seconds)
            _note(system, label, rate, before, requests)


def measure_streams(found: list[System], label: str, seconds: float) -> None:
    for system in found:
        before = system.cpu_s()
        rate, chunks = read_streams(system.port, 256, seconds)
        _note(system, label, rate, before, chunks)


def read_streams(port: int, count: int, seconds: float) -> tuple[float, float]:
    """Chunks a second, and how many there were."""
    command = [sys.executable, str(STREAMS), "read", f"127.0.0.1:{port}", str(count), f"{seconds:g}", KEY]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60).stdout
    rate, chunks = (float(word) for word in said.split())
    return rate, chunks


def _note(system: System, label: str, rate: float, before_s: float, count: float) -> None:
    system.figures.setdefault(label, []).append(rate)
    system.cpu_us.setdefault(label, []).append((system.cpu_s() - before_s) / max(count, 1) * 1e6)


def show(found: list[System]) -> None:
    by_name = {system.name: system for system in found}
    ratios = [(name, target) for name, target in RATIOS if name in by_name]
    heads = [*by_name, *(f"ours ÷ {name} {target}".strip() for name, target in ratios)]
    print("| measure | " + " | ".join(heads) + " |")
    print("|---|" + "---:|" * len(heads))
    for label in by_name[OURS].figures:
        _row(label, {s.name: statistics.median(s.figures.get(label, [0.0])) for s in found}, ratios, "{:,.0f}")
    for label in by_name[OURS].cpu_us:
        unit = "request" if label.startswith("req") else "chunk"
        spent = {s.name: statistics.median(s.cpu_us.get(label, [0.0])) for s in found}
        _row(f"CPU per {unit}, {label.partition(', ')[2]}", spent, ratios, "{:.1f} µs")
    print(flush=True)


def _row(label: str, values: dict[str, float], ratios: list[tuple[str, str]], form: str) -> None:
    cells = [form.format(value) if value else "" for value in values.values()]
    against = [f"{values[OURS] / values[name]:.2f}" if values[name] else "" for name, _ in ratios]
    print(f"| {label} | " + " | ".join(cells + against) + " |")


def measure_memory(root: Path, count: int) -> None:
    """One chunk a second on each of so many streams: what is held is what open streams cost, not what passes."""
    with stream_upstream(root, 1000) as upstream, our_way(root, upstream) as (port, gateway, ingress):
        warm_up(System(OURS, port, None))
        before = [_mb(gateway), _mb(ingress)]
        command = [sys.executable, str(STREAMS), "read", f"127.0.0.1:{port}", str(count), "6", KEY]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reading:
            deadline = time.monotonic() + 60
            while len(gateway.net_connections()) < 2 * count and reading.poll() is None:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{count} streams could not be opened")
                time.sleep(0.1)
            time.sleep(2)  # until each has brought something
            held = [_mb(gateway), _mb(ingress)]
            said, _ = reading.communicate(timeout=60)
        if reading.returncode or float(said.split()[1]) < count:
            raise SystemExit(f"not all of {count} streams brought something: {said}")
    print(f"| memory | idle | {count:,} open streams | target |")
    print("|---|---:|---:|---:|")
    for name, was, now in zip(("gateway", "ingress"), before, held, strict=True):
        print(f"| {name} | {was:.0f} MB | {now:.0f} MB | |")
    print(f"| both | {sum(before):.0f} MB | {sum(held):.0f} MB | < 300 MB |\n", flush=True)


def measure_whole_system(root: Path, seconds: float, rounds: int, *, over_tcp: bool) -> None:
    with contextlib.ExitStack() as stack:
        found: list[Whole] = []
        for start in (two_nginx, two_doors, *([corral_up_over_tcp] if over_tcp else []), corral_up):
            place = root / start.__name__
            place.mkdir()
            found.append(stack.enter_context(start(place)))
        time.sleep(4)  # until each has settled its memory
        for turn in range(rounds):
            for kind, unit in (("plain", "req/s"), ("stream", "streams/s")):
                for connections in (1, 32, 256):
                    for system in found if turn % 2 else reversed(found):
                        system.measure(f"{unit}, {connections} conn.", connections, seconds, kind)
        show_whole_system(found)


def show_whole_system(found: list[Whole]) -> None:
    theirs, ours = found[0], found[-1]
    print(f"| measure | {' | '.join(each.name for each in found)} | {ours.name} ÷ {theirs.name} | target |")
    print("|---|" + "---:|" * (len(found) + 2))
    for label in ours.rates:
        rates = [statistics.median(each.rates[label]) for each in found]
        cells = " | ".join(f"{rate:,.0f}" for rate in rates)
        print(f"| {label} | {cells} | {rates[-1] / rates[0]:.2f} | {WHOLE_TARGET} |")
    print("\nCPU per answer of each process, in µs, lower quartile of the turns.")
    print("`÷`: all of them together, as nginx → nginx over the system.\n")
    print("| measure | system | all | ÷ | processes |\n|---|---|---:|---:|---|")
    for label in ours.rates:
        together = [sum(each.cpu_us_by_process(label).values()) for each in found]
        for each, micros in zip(found, together, strict=True):
            told = ", ".join(f"{role} {spent:.1f}" for role, spent in each.cpu_us_by_process(label).items())
            print(f"| {label} | {each.name} | {micros:.1f} | {together[0] / micros:.2f} | {told} |")
    print(flush=True)


def _mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1, help="of each single measurement")
    parser.add_argument(
        "--rounds",
        type=int,
        default=8,
        help="each system takes its turn so often",
    )
    parser.add_argument("--streams", type=int, default=1000, help="open at once while memory is looked at")
    parser.add_argument("--without", action="append", default=[], choices=[ROUTER, LITELLM], help="leave it out")
    parser.add_argument("--only-whole-system", action="store_true", help="leave the second and third part out")
    parser.add_argument("--over-tcp", action="store_true", help="also the whole system with TCP to the worker")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        measure_whole_system(Path(folder), chosen.seconds, chosen.rounds, over_tcp=chosen.over_tcp)
    if chosen.only_whole_system:
        return
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        root = Path(folder)
        others = Others(
            None if ROUTER in chosen.without else install("sglang-router"),
            None if LITELLM in chosen.without else install("litellm[proxy]"),
        )
        place = root / "plain"
        place.mkdir()
        with plain_upstream(root / "upstream") as upstream, systems(place, upstream, others) as found:
            for _ in range(chosen.rounds):
                measure_plain(found, root, chosen.seconds)
            show(found)
        for label, pace_ms in (("chunks/s, 256 streams, 20 ms each", 20), ("chunks/s, 256 streams, unpaced", 0)):
            place = root / f"streams-{pace_ms}"
            place.mkdir()
            of_streams = replace(others, litellm=None)
            with stream_upstream(place, pace_ms) as upstream, systems(place, upstream, of_streams) as found:
                for _ in range(chosen.rounds):
                    measure_streams(found, label, chosen.seconds)
                show(found)
        place = root / "memory"
        place.mkdir()
        measure_memory(place, chosen.streams)


if __name__ == "__main__":
    main()
