"""A real model through Corral and beside it: tokens a second of SmolLM2, asked at its own port and through the fleet.

    scripts/bench tokens [--rounds N] [--tokens N]

`corral up` with its usual settings installs the engine and the model; the process that then serves is asked in turn
directly and through gateway and ingress, with the same prompt, for the same number of tokens, streamed. The engine
takes all the CPU there is, so what the way costs shows. Medians of many short turns, because one turn differs from the
next by a tenth while the way costs a fiftieth; who goes first alternates. The target is 0.97 of direct. On a machine
that does other things too the engine's threads wait for each other, and nothing of this means anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

from tests.support.fleet import SHORT, Fleet

MODEL, TARGET = "smollm2-135m", 0.97
STREAMS = (1, 2)  # as many as its definition serves at once
QUIET = {name for name in SHORT if "GALLERIES" not in name}


def serving_port(fleet: Fleet) -> int:
    """The engine's own, from its command line."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--port" in words and MODEL in words and any(str(fleet.data) in word for word in words):
            return int(words[words.index("--port") + 1])
    raise SystemExit(f"no process serves {MODEL}")


async def ask(port: int, key: str, tokens: int) -> int:
    """How many events came."""
    prompt = "Tell a long story about a corral."
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    count = 0
    while data := await reader.read(1 << 16):
        count += data.count(b"data: {")
    writer.close()
    if count < tokens:
        raise SystemExit(f"{count} of {tokens} tokens came")
    return count


async def rate(port: int, key: str, tokens: int, streams: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(ask(port, key, tokens) for _ in range(streams)))
    return tokens * streams / (time.perf_counter() - began)


def measure(fleet: Fleet, rounds: int, tokens: int) -> None:
    ways = {"direct": serving_port(fleet), "corral": fleet.port}
    print("| streams | direct | through Corral | ratio | target |")
    print("|---:|---:|---:|---:|---:|")
    for streams in STREAMS:
        figures: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):  # the first only warms up
            for name in sorted(ways, reverse=bool(number % 2)):
                figures[name].append(uvloop.run(rate(ways[name], fleet.key, tokens, streams)))
        direct, corral = (statistics.median(figures[name][1:]) for name in ways)
        print(
            f"| {streams} | {direct:.1f} tokens/s | {corral:.1f} tokens/s | {corral / direct:.3f} | ≥ {TARGET} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        fleet = Fleet(Path(folder))
        for name in QUIET:  # what tests shorten costs CPU
            fleet.env.pop(name, None)
        try:
            fleet.start()
            said = fleet.cli("chat", MODEL, "Hello.", "--max-tokens", "8", timeout_s=600)
            if said.returncode:
                raise SystemExit(said.stderr)
            measure(fleet, chosen.rounds, chosen.tokens)
        finally:
            fleet.close()


if __name__ == "__main__":
    main()
