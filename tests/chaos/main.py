"""`scripts/chaos`: a real fleet under load while its processes die, stop and are cut off.

It says what clients saw and what was lost.

The fleet: one bus, two controllers on PostgreSQL, two gateways, four workers on machines of their own, the mock backend
and a real language model. See docs/reference/evidence.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from tests.chaos.at_rest import comes_to_rest, left_behind
from tests.chaos.clients import Asked, Clients
from tests.chaos.faults import Faults
from tests.chaos.fleet import FAKETIME, MOCK, ChaosFleet, chaos_fleet
from tests.chaos.people import EDITED, People
from tests.chaos.watcher import Growth, InvariantWatcher, MemoryWatcher
from tests.support.fleet import Fleet
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
LLM = "smollm2-135m"
CLIENTS = 6
MODELS = (
    Asked("mock-one", stream=False, weight=4),
    Asked(EDITED, stream=False, weight=4),
    Asked(EDITED, stream=True, weight=4),
    Asked(LLM, stream=True, weight=1, echoes=False),
)
WORKERS = 4
SETTLE_S = 20.0
TICK_S = 0.2


@dataclass
class Result:
    seed: int
    minutes: float
    faults: Counter[str] = field(default_factory=Counter)
    requests_of_people: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    wrong_answers: list[str] = field(default_factory=list)
    p50_s: float = 0.0
    p99_s: float = 0.0
    operations: int = 0
    looks: int = 0
    violations: list[str] = field(default_factory=list)
    not_at_rest: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    journal: list[tuple[float, str]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.violations or self.not_at_rest or self.left_behind or self.wrong_answers)


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    models = [each for each in MODELS if not (options.without_llm and each.model == LLM)]
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cc.", ignore_cleanup_errors=True)))
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            root = options.keep.resolve()
        bundle = None if options.without_llm else _bundle()
        print("starting the fleet", file=sys.stderr, flush=True)
        fleet = stack.enter_context(chaos_fleet(root, workers=WORKERS, small_disk="700m"))
        _set_up(fleet, models, bundle)
        result = run(fleet, models, options)
    text = report(result)
    if options.report is not None:
        options.report.write_text(text + "\n")
    print(as_json(result) if options.json else text)
    return 0 if result.is_good else 1


def run(fleet: ChaosFleet, models: Sequence[Asked], options: argparse.Namespace) -> Result:
    result = Result(options.seed, options.minutes)
    over, watched = threading.Event(), threading.Event()
    faults = Faults(fleet, Random(f"{options.seed} faults"), every_s=options.every)
    people = People(fleet, Random(f"{options.seed} people"), every_s=options.every * 2)
    clients = Clients(fleet.hub, fleet.urls, fleet.key, models, seed=options.seed, pause_s=options.pause)
    invariants, memory = InvariantWatcher(fleet), MemoryWatcher(fleet.members)
    workers = [_thread(f"client {n}", lambda n=n: clients.run(n, over)) for n in range(CLIENTS)]  # type: ignore[misc]
    watchers = [_thread("invariants", lambda: invariants.run(watched)), _thread("memory", lambda: memory.run(watched))]
    if not options.without_faults:
        workers.append(_thread("people", lambda: people.run(over)))
    _pass_time(options.minutes * 60, clients, faults, invariants, has_faults=not options.without_faults)
    over.set()
    faults.end_all()
    for thread in workers:
        thread.join(timeout=150)
    result.not_at_rest = comes_to_rest(fleet, people, models)
    _pass_time(SETTLE_S, clients, faults, invariants, has_faults=False)
    watched.set()
    for thread in watchers:
        thread.join(timeout=60)
    for worker in fleet.workers:
        assert worker.process is not None
        worker.process.stop(timeout_s=90)
    result.left_behind = left_behind(fleet)
    tally = clients.tally
    result.faults, result.journal = faults.counts, faults.journal
    result.requests_of_people, result.operations = people.counts, len(people.accepted)
    result.answered, result.failed, result.wrong_answers = tally.answered, tally.failed, tally.wrong
    if len(tally.latencies_s) >= 2:
        cuts = statistics.quantiles(tally.latencies_s, n=100)
        result.p50_s, result.p99_s = cuts[49], cuts[98]
    result.looks, result.violations = invariants.looks, invariants.violations
    result.growth = memory.growth()
    return result


def _pass_time(
    seconds: float, clients: Clients, faults: Faults, invariants: InvariantWatcher, *, has_faults: bool
) -> None:
    until = time.monotonic() + seconds
    told_at = time.monotonic()
    while time.monotonic() < until:
        time.sleep(TICK_S)
        if has_faults:
            faults.run_once()
        if time.monotonic() - told_at >= 60:
            told_at = time.monotonic()
            tally = clients.tally
            state = f"{faults.counts.total()} faults, {tally.asked} requests, {tally.failed.total()} failed"
            print(f"{state}, {len(invariants.violations)} violations", file=sys.stderr, flush=True)


def _thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _set_up(fleet: ChaosFleet, models: Sequence[Asked], bundle: Path | None) -> None:
    for name in ("mock-one", EDITED):
        definition = {"name": name, "backend": MOCK, "parallel": 8, "memory": "64MiB"}
        answer = fleet.api("POST", "/api/models", {"definition": definition})
        assert answer.status == 201, answer.body
    if bundle is not None:
        for url in fleet.urls:  # a bundle is on the controller that received it
            _run(fleet, "bundle", "load", str(bundle), "--url", url)
        _run(fleet, "models", "install", LLM)
    for name in dict.fromkeys(each.model for each in models):
        _run(fleet, "models", "scale", name, "--min", "2")
    for asked in models:
        wait_for(lambda asked=asked: _answers(fleet, asked.model), f"an answer of {asked.model}", 180)  # type: ignore[misc]


def _answers(fleet: ChaosFleet, model: str) -> bool:
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    return fleet.api("POST", "/v1/chat/completions", body).status == 200


def _run(fleet: ChaosFleet, *words: str) -> None:
    ran = fleet.command(*words)
    if ran.returncode != 0:
        raise RuntimeError(f"corral {' '.join(words)}: {ran.stdout[-500:]}{ran.stderr[-500:]}")


def _bundle() -> Path:
    """The engine and the model, fetched once by a fleet that reaches the package index: the run itself does not."""
    path = ROOT / ".corral" / "chaos" / f"{LLM}.bundle"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"making a bundle of {LLM} and its engine, once", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="cb.") as folder:
        fleet = Fleet(Path(folder))
        try:
            fleet.start()
            fleet.wait_status(fleet.own_node(), "healthy")
            for words in (("models", "install", LLM), ("bundle", "create", str(path), "--model", LLM)):
                ran = fleet.cli(*words, timeout_s=400)
                if ran.returncode != 0:
                    raise RuntimeError(ran.stdout + ran.stderr)
        finally:
            fleet.close()
    return path


def report(result: Result) -> str:
    asked = result.answered.total() + result.failed.total()
    share = result.failed.total() / asked * 100 if asked else 0.0
    figures = [
        ("minutes, seed", f"{result.minutes:g}, {result.seed}"),
        ("faults", f"{result.faults.total():,}"),
        ("requests of clients", f"{asked:,}"),
        ("of these failed, without any retry", f"{result.failed.total():,} ({share:.2f} %)"),
        ("answers to another question", f"{len(result.wrong_answers)}"),
        ("seconds to an answer, median and 99th percentile", f"{result.p50_s:.2f}, {result.p99_s:.2f}"),
        ("operations accepted", f"{result.operations:,}"),
        ("looks at the invariants", f"{result.looks:,}"),
        ("violations", f"{len(result.violations)}"),
        ("not as it should be after the faults", f"{len(result.not_at_rest)}"),
        ("processes and files left behind", f"{len(result.left_behind)}"),
    ]
    parts = _table(("figure", "value"), figures)
    for head, counter in (
        ("fault", result.faults),
        ("cause of a failed request", result.failed),
        ("request of people", result.requests_of_people),
    ):
        if counter:
            parts += ["", *_table((head, "times"), [(name, f"{count:,}") for name, count in counter.most_common()])]
    if result.growth:
        mib = 1 << 20
        rows = [
            (
                each.name,
                f"{each.minutes:.0f} min, {each.last_bytes / mib:.0f} MiB, {each.bytes_per_hour / mib:+.1f} MiB/h",
            )
            for each in result.growth
        ]
        parts += ["", *_table(("process", "lived, memory at the end, slope"), rows)]
    for head, lines in (
        ("Violations", result.violations),
        ("Not at rest", result.not_at_rest),
        ("Left behind", result.left_behind),
        ("Wrong answers", result.wrong_answers[:20]),
    ):
        if lines:
            parts += ["", f"{head}:", "", *(f"- {line}" for line in lines)]
    return "\n".join(parts)


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "|---|---:|", *(f"| {left} | {right} |" for left, right in rows)]


def as_json(result: Result) -> str:
    # Not `asdict`: it copies a Counter from pairs, and so counts the pairs.
    return json.dumps(msgspec.to_builtins(result), indent=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Run a real fleet under load (a bus, two controllers on PostgreSQL, two gateways, four workers on "
        "machines of their own, mocks and a real language model) while its processes are killed and stopped, machines "
        "are cut off, a disk is full and clocks step; then say what clients saw, and whether anything was lost. "
        "Exit status: 0 nothing was lost, 1 something was.",
        epilog="Needs root (network namespaces) and, for clock steps, Debian's faketime.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, metavar="M", help="how long faults are injected (10)")
    add("--seed", type=int, default=0, metavar="S", help="chooses the faults and the requests of people (0)")
    add("--every", type=float, default=8.0, metavar="SECONDS", help="mean time between two faults (8)")
    add("--pause", type=float, default=0.2, metavar="SECONDS", help="mean pause of a client between requests (0.2)")
    add("--without-faults", action="store_true", help="load only: how the memory of each process grows")
    add("--without-llm", action="store_true", help="mocks only: needs no package index")
    add("--report", type=Path, help="also write the report, as Markdown, to this file")
    add("--json", action="store_true", help="print the result as one JSON document, with a journal of the faults")
    add("--keep", type=Path, metavar="FOLDER", help="keep data and logs of all processes here")
    return parser


if __name__ == "__main__":
    if FAKETIME is None:
        print("scripts/chaos: no faketime, so no clock steps (apt-get install faketime)", file=sys.stderr)
    sys.exit(main())
