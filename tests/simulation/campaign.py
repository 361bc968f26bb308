"""`scripts/simulate`: runs many seeds in several processes and writes a report of what they went through.

Each seed adds one line of JSON to the state file, so an interrupted campaign continues where it stopped. Lines of
another state of the code do not count: the file names the tree that they belong to.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.simulation.simulation import simulate
from tests.simulation.transfers import simulate_transfers
from tests.simulation.trouble import chaos
from tests.support.sqlite import sqlite_template

ROOT = Path(__file__).resolve().parents[2]
FLEET, TRANSFERS = "fleet", "transfers"
TRANSFERS_EVERY = 4  # one seed of transfers for so many of the fleet, as in the tests
MEMORY = Path("/dev/shm")  # no disk waits there for a file to be synced
TREES = ("src/corral", "tests/simulation", "tests/support")


@dataclass(frozen=True)
class Run:
    """One seed of one world."""

    world: str
    seed: int


@dataclass
class Totals:
    seeds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    checked_states: int = 0
    node_s: float = 0.0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    violations: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        self.seeds[line["world"]] += 1
        self.cpu_s += line["cpu_s"]
        if line.get("violation"):
            self.violations.append({key: line[key] for key in ("world", "seed", "violation")})
            return
        self.faults.update(line["faults"])
        self.requests.update(line["requests"])
        self.commits += line["commits"]
        self.checked_states += line["checked_states"]
        self.node_s += line["node_s"]
        self.simulated_s += line["simulated_s"]


def planned(seeds: int, first: int) -> list[Run]:
    fleet = [Run(FLEET, seed) for seed in range(first, first + seeds)]
    return fleet + [Run(TRANSFERS, seed) for seed in range(first, first + seeds // TRANSFERS_EVERY)]


def tree_digest() -> str:
    """Of the code that runs: results of another tree say nothing about this one."""
    found = hashlib.sha256()
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def run_seed(run: Run, template: Path) -> dict[str, Any]:
    began = time.process_time()
    line: dict[str, Any] = {"world": run.world, "seed": run.seed}
    try:
        if run.world == FLEET:
            census = simulate(run.seed, template, chaos=chaos).census
        else:
            with tempfile.TemporaryDirectory(prefix="corral-sim-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
                census = simulate_transfers(run.seed, Path(folder)).census
        line |= census.as_json()
    except Exception as error:
        said = str(error).strip().splitlines() or [repr(error)]
        line["violation"] = said[0]
    return line | {"cpu_s": round(time.process_time() - began, 3)}


def _serve(template: Path) -> int:
    """In a process of its own: seeds come on standard input, results leave on standard output."""
    answers = sys.stdout
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # of what is simulated, its log
        for line in sys.stdin:
            world, seed = line.split()
            print(json.dumps(run_seed(Run(world, int(seed)), template)), file=answers, flush=True)
    return 0


class Results:
    """The state file: its first line names the tree, each other one is a seed."""

    def __init__(self, path: Path, tree: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = list(_read_lines(path))
        self.discarded = len(lines) - 1 if lines and lines[0].get("tree") != tree else 0
        self.lines = [] if not lines or lines[0].get("tree") != tree else lines[1:]
        if not self.lines:
            path.write_text(json.dumps({"tree": tree}) + "\n")

    @property
    def done(self) -> set[Run]:
        return {Run(line["world"], line["seed"]) for line in self.lines}

    def add(self, line: dict[str, Any]) -> None:
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            self.lines.append(line)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(text)
        except ValueError:  # the last line of a run that was killed
            return


class Campaign:
    def __init__(self, runs: Sequence[Run], results: Results, jobs: int, out: TextIO) -> None:
        self._left = iter(runs)
        self._count = len(runs)
        self._results = results
        self._jobs = jobs
        self._out = out
        self._lock = threading.Lock()
        self._ended = 0
        self._violations = 0

    def run(self, template: Path) -> None:
        with ThreadPoolExecutor(self._jobs) as threads:
            for done in [threads.submit(self._work, template) for _ in range(self._jobs)]:
                done.result()

    def _work(self, template: Path) -> None:
        command = [sys.executable, "-m", "tests.simulation.campaign", "--serve", str(template)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            while (run := self._next()) is not None:
                process.stdin.write(f"{run.world} {run.seed}\n")
                process.stdin.flush()
                answer = process.stdout.readline()
                if not answer:
                    raise RuntimeError(f"the process that ran {run.world} seed {run.seed} ended")
                self._results.add(json.loads(answer))
                self._tell(json.loads(answer))

    def _next(self) -> Run | None:
        with self._lock:
            return next(self._left, None)

    def _tell(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._ended += 1
            violation = line.get("violation")
            if violation:
                self._violations += 1
                print(f"VIOLATED {line['world']} seed {line['seed']}: {violation}", file=self._out, flush=True)
            if self._ended % 100 == 0 or self._ended == self._count:
                state = f"{self._ended} of {self._count} seeds, {self._violations} violations"
                print(state, file=self._out, flush=True)


def totals_of(lines: Iterable[dict[str, Any]], runs: Iterable[Run]) -> Totals:
    wanted, totals = set(runs), Totals()
    for line in sorted(lines, key=lambda line: (line["world"], line["seed"])):
        if Run(line["world"], line["seed"]) in wanted:
            totals.add(line)
    return totals


def report(totals: Totals, tree: str) -> str:
    speed = totals.simulated_s / totals.cpu_s if totals.cpu_s else 0.0
    rows = [
        ("seeds of the fleet", f"{totals.seeds[FLEET]:,}"),
        ("seeds of transfers between nodes", f"{totals.seeds[TRANSFERS]:,}"),
        ("simulated node-hours (running workers only)", f"{totals.node_s / 3600:,.0f}"),
        ("simulated hours", f"{totals.simulated_s / 3600:,.0f}"),
        ("CPU hours", f"{totals.cpu_s / 3600:,.2f}"),
        ("simulated time per CPU time", f"{speed:,.0f} ×"),
        ("commits", f"{totals.commits:,}"),
        ("states in which the invariants were checked", f"{totals.checked_states:,}"),
        ("faults injected", f"{totals.faults.total():,}"),
        ("requests of people and clients", f"{totals.requests.total():,}"),
        ("violations", f"{len(totals.violations):,}"),
    ]
    parts = [f"Code: tree {tree}", "", *_table(("figure", "value"), rows), ""]
    parts += [*_table(("fault", "times"), _counted(totals.faults)), ""]
    parts += _table(("request", "times"), _counted(totals.requests))
    if totals.violations:
        found = [(f"{each['world']} {each['seed']}", each["violation"]) for each in totals.violations]
        parts += ["", *_table(("seed", "violation"), found)]
    return "\n".join(parts)


def _counted(counter: Counter[str]) -> list[tuple[str, str]]:
    return [(name, f"{count:,}") for name, count in counter.most_common() if count]


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"| {left} | {right} |" for left, right in rows]
    return [f"| {head[0]} | {head[1]} |", "|---|---:|", *lines]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description="Run many seeds of the simulation and print a report: what was simulated, which faults were "
        "injected, how often the invariants were checked, and every violation. An interrupted run continues. "
        "Exit status: 0 no violation, 1 an invariant was violated.",
        epilog="Replay one seed with its trace: scripts/test simulation --seed N (see docs/contributing.md).",
    )
    add = parser.add_argument
    add(
        "--seeds", type=int, default=2000, metavar="N", help="seeds of the fleet; a quarter of them of transfers (2000)"
    )
    add("--first-seed", type=int, default=0, metavar="N", help="the seed to begin with (0)")
    add("--jobs", type=int, default=0, metavar="J", help="processes (one per core)")
    add("--state", type=Path, default=ROOT / ".corral" / "simulate.jsonl", help="where results are kept, to continue")
    add("--report", type=Path, help="also write the report, as Markdown, to this file")
    add("--json", action="store_true", help="print the report as one JSON document")
    add("--serve", type=Path, help=argparse.SUPPRESS)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    if options.serve is not None:
        return _serve(options.serve)
    if options.seeds < 1 or options.jobs < 0:
        print("scripts/simulate: --seeds takes a number from 1, --jobs one from 0", file=sys.stderr)
        return 2
    tree, runs = tree_digest(), planned(options.seeds, options.first_seed)
    results = Results(options.state, tree)
    if results.discarded:
        print(f"results of other code are discarded: {results.discarded} seeds", file=sys.stderr)
    left = [run for run in runs if run not in results.done]
    print(f"{len(left)} of {len(runs)} seeds to run", file=sys.stderr, flush=True)
    Campaign(left, results, options.jobs or os.cpu_count() or 1, sys.stderr).run(sqlite_template())
    totals = totals_of(results.lines, runs)
    text = report(totals, tree)
    if options.report is not None:
        options.report.write_text(text + "\n")
    print(json.dumps(_as_json(totals, tree), indent=2) if options.json else text)
    return 1 if totals.violations else 0


def _as_json(totals: Totals, tree: str) -> dict[str, Any]:
    return {"tree": tree, **vars(totals)}


if __name__ == "__main__":
    sys.exit(main())
