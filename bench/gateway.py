"""The gateway beside nginx and a Rust router, in front of the same upstream, in one run: ratios, not seconds.

    scripts/bench gateway [--seconds 3] [--rounds 3] [--without-router] [--system 'NAME=COMMAND {port} {upstream}']

Plain requests: chat requests as OpenAI's Python client sends them, in many lengths (`support/traffic.py`), over
keep-alive connections (wrk); the upstream is nginx answering from memory. Streams: 256 open streams, 20 ms per chunk
and as fast as it goes, from and to bare asyncio protocols. Every system is one process on this machine's loopback;
systems take turns, and medians are shown. CPU is the proxy's own, per request or per chunk. On a machine that does
other things too only the CPU means something: take many short rounds.

nginx is the leanest proxy_pass there is: one worker, kept connections both ways, no access log, no header of its own.
"bare relay" is the floor (`support/bare_relay.py`), "relay alone" the gateway's relay with nothing in front of it, and
"gateway + relay" two hops, as to a worker's ingress, measured with one connection only.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.support.systems import Choice, System, install, plain_upstream, stream_upstream, systems
from bench.support.traffic import KEY, wrk_script

STREAMS = Path(__file__).parent / "support" / "streams.py"
ONE = "req/s, 1 conn."


def wrk(system: System, root: Path, *, connections: int, seconds: float) -> tuple[int, float, float]:
    """Requests, requests a second, and half of them within so many microseconds."""
    script = root / "chat.lua"
    script.write_text(wrk_script())
    url = f"http://127.0.0.1:{system.port}/v1/chat/completions"
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(script), url]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 30).stdout
    requests, micros, p50 = re.findall(r"RESULT (\d+) (\d+) ([\d.]+)", said)[0]
    faults = int(re.findall(r"FAULTS (\d+)", said)[0])
    if faults:
        raise SystemExit(f"{system.name} failed {faults} requests at {connections} connections")
    return int(requests), int(requests) / (int(micros) / 1e6), float(p50)


def measure_plain(found: list[System], root: Path, seconds: float) -> None:
    for connections in (1, 32, 256):
        label = f"req/s, {connections} conn."
        for system in found:
            if system.single and label != ONE:
                continue
            before = system.cpu_s()
            requests, rate, p50 = wrk(system, root, connections=connections, seconds=seconds)
            system.figures.setdefault(label, []).append(rate)
            system.cpu_us.setdefault(label, []).append((system.cpu_s() - before) / max(requests, 1) * 1e6)
            system.latency_us.setdefault(label, []).append(p50)


def measure_streams(found: list[System], label: str, seconds: float) -> None:
    for system in found:
        if system.single:
            continue
        command = [sys.executable, str(STREAMS), "read", f"127.0.0.1:{system.port}", "256", f"{seconds:g}", KEY]
        before = system.cpu_s()
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60).stdout
        rate, chunks = (float(word) for word in said.split())
        system.figures.setdefault(label, []).append(rate)
        system.cpu_us.setdefault(label, []).append((system.cpu_s() - before) / max(chunks, 1) * 1e6)


def show(found: list[System]) -> None:
    """One row per measure; the last columns set the gateway against the others."""
    shown = [system for system in found if not system.single]
    by_name = {system.name: system for system in found}
    router = by_name.get("sglang-router")
    labels = list(dict.fromkeys(label for system in found for label in system.figures))
    heads = [system.name for system in shown] + ["gateway ÷ nginx", "relay ÷ nginx"]
    print("| measure | " + " | ".join(heads + (["gateway ÷ router"] if router else [])) + " |")
    print("|---|" + "---:|" * (len(heads) + bool(router)))
    for label in labels:
        print(row(label, shown, {s.name: statistics.median(s.figures[label]) for s in shown}, "{:,.0f}"))
    for label in labels:
        unit = "request" if label.startswith("req") else "chunk"
        spent = {s.name: statistics.median(s.cpu_us[label]) for s in shown if s.process is not None}
        print(row(f"CPU per {unit}, {label.partition(', ')[2]}", shown, spent, "{:.1f} µs"))
    if ONE in labels:
        p50 = {s.name: statistics.median(s.latency_us[ONE]) for s in found}
        print(row("p50, 1 conn.", shown, p50, "{:.0f} µs"))
        added = {name: (value - p50["direct"]) / 1000 for name, value in p50.items() if name.startswith("gateway")}
        print("\nAdded to direct, p50: " + ", ".join(f"{name} {value:.2f} ms" for name, value in added.items()))
    print(flush=True)


def row(label: str, shown: list[System], values: dict[str, float], form: str) -> str:
    cells = [form.format(values[system.name]) if system.name in values else "" for system in shown]
    pairs = [("gateway", "nginx"), ("relay alone", "nginx")]
    if "sglang-router" in {system.name for system in shown}:
        pairs.append(("gateway", "sglang-router"))
    ratios = [f"{values[ours] / values[theirs]:.2f}" if values.get(theirs) else "" for ours, theirs in pairs]
    return f"| {label} | " + " | ".join(cells + ratios) + " |"


def read_system(text: str) -> tuple[str, str]:
    name, separator, command = text.partition("=")
    if not separator or "{port}" not in command or "{upstream}" not in command:
        raise argparse.ArgumentTypeError("say NAME=COMMAND with {port} and {upstream} in the command")
    return name, command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each single measurement")
    parser.add_argument("--rounds", type=int, default=3, help="each system takes its turn so often")
    parser.add_argument("--without-router", action="store_true", help="leave sglang-router out")
    parser.add_argument("--without-streams", action="store_true", help="plain requests only")
    parser.add_argument("--system", type=read_system, action="append", default=[], help="one more to compare")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        root = Path(folder)
        choice = Choice(None if chosen.without_router else install("sglang-router"), tuple(chosen.system))
        place = root / "plain"
        place.mkdir()
        plain = dataclasses.replace(choice, floor=True)
        with plain_upstream(root / "upstream") as upstream, systems(place, upstream, plain) as found:
            for _ in range(chosen.rounds):
                measure_plain(found, root, chosen.seconds)
            show(found)
        if chosen.without_streams:
            return
        for label, pace_ms in (("chunks/s, 256 streams, 20 ms each", 20), ("chunks/s, 256 streams, unpaced", 0)):
            place = root / f"streams-{pace_ms}"
            place.mkdir()
            with stream_upstream(place, pace_ms) as upstream, systems(place, upstream, choice) as found:
                for _ in range(chosen.rounds):
                    measure_streams(found, label, chosen.seconds)
                show(found)


if __name__ == "__main__":
    main()
