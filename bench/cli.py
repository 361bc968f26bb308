"""How long commands take, as multiples of a bare interpreter's start.

    scripts/bench cli

CPU of the whole process, the median of several runs in turn, against a controller and a gateway of this machine that
have nothing to do. The targets: `--help` 2, lists 3.5.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.fleet import PATIENT, Fleet

ROUNDS = 15
BARE = (sys.executable, "-P", "-c", "")
CORRAL = (sys.executable, "-P", "-m", "corral.cli.main")  # as the launcher of an installed Corral starts it
COMMANDS = (("--help",), ("--version",), (), ("nodes", "list"), ("models", "list"), ("ops", "list"), ("ps",))
LIMITS = {("--help",): 2.0, ("nodes", "list"): 3.5, ("models", "list"): 3.5, ("ops", "list"): 3.5, ("ps",): 3.5}


def measure(command: tuple[str, ...], env: dict[str, str]) -> tuple[float, float]:
    """CPU and time of one run, in milliseconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=60)
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3, took * 1e3


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        fleet = Fleet(Path(root), **PATIENT)
        try:
            fleet.start()
            fleet.wait_status(fleet.own_node(), "healthy")
            table(fleet.env | {"PATH": os.environ["PATH"]})
        finally:
            fleet.close()


def table(env: dict[str, str]) -> None:
    runs: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for _ in range(ROUNDS):
        for words in (None, *COMMANDS):
            command = BARE if words is None else (*CORRAL, *words)
            runs.setdefault(command, []).append(measure(command, env))
    medians = {
        command: tuple(statistics.median(each) for each in zip(*found, strict=True)) for command, found in runs.items()
    }
    bare_cpu, bare_wall = medians[BARE]
    print(f"a bare interpreter: {bare_cpu:.1f} ms of CPU, {bare_wall:.1f} ms\n")
    print("| command | CPU | of a bare interpreter | goal | time |\n|---|---:|---:|---:|---:|")
    for words in COMMANDS:
        cpu, wall = medians[(*CORRAL, *words)]
        goal = LIMITS.get(words, "")
        print(f"| `corral {' '.join(words)}` | {cpu:.0f} ms | {cpu / bare_cpu:.1f} | {goal} | {wall:.0f} ms |")


if __name__ == "__main__":
    main()
