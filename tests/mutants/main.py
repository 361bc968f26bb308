"""`scripts/mutants`: plants faults, runs the tests that should notice them, and names those that nobody noticed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutants.catalog import DECIDING_PACKAGES, Catalog, Mutant, PlantedFault, UnknownMutant
from tests.mutants.planted import PLANTED
from tests.mutants.state import State
from tests.mutants.trial import KINDS, Trial, Verdict, WorkingCopy, default_jobs

ROOT = Path(__file__).resolve().parents[2]


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    catalog = Catalog(ROOT)
    try:
        mutants = _chosen(catalog, options)
    except UnknownMutant as error:
        print(f"scripts/mutants: {error}", file=sys.stderr)
        return 2
    if options.list:
        _print_list(mutants, as_json=options.json)
        return 0
    return _run(mutants, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/mutants",
        description="Change one function at a time and run the tests that should notice: unit tests that import its "
        "module, then integration tests, then seeds of the simulation, until one fails. Without options: every planted "
        "fault; with --kinds simulation alone, those that the seeds must notice. Exit status: 0 all were caught, "
        "1 some survived, 2 there is no such mutant.",
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the names of the mutants and run nothing")
    add("--only", action="append", default=[], metavar="NAME", help="only this mutant, by its name; may be repeated")
    add("--generic", type=int, nargs="?", const=-1, metavar="N", help="N mutants of the generic operators, by chance")
    add("--module", action="append", default=[], help="with --generic: in this module or package; may be repeated")
    add("--seed", type=int, default=0, help="with --generic: the same seed chooses the same mutants (default 0)")
    add("--seeds", type=int, default=200, metavar="N", help="seeds of the simulation before a mutant survives (200)")
    add("--kinds", default=",".join(KINDS), help=f"which tests to run, by commas (default {','.join(KINDS)})")
    add("--jobs", type=int, default=default_jobs(), help="processes for the seeds of the simulation")
    add("--state", type=Path, default=ROOT / ".corral" / "mutants.json", help="where results are kept, to go on later")
    add("--again", action="store_true", help="run also what has a result")
    add("--json", action="store_true", help="print one JSON document instead of lines")
    return parser


def _chosen(catalog: Catalog, options: argparse.Namespace) -> list[Mutant]:
    planted = {fault.name: fault for fault in PLANTED}
    if options.only:
        return [catalog.planted(planted[name]) if name in planted else catalog.named(name) for name in options.only]
    if options.generic is None:
        by_seeds_alone = options.kinds == "simulation"
        return [catalog.planted(fault) for fault in PLANTED if fault.simulated or not by_seeds_alone]
    modules = options.module or DECIDING_PACKAGES
    if options.generic < 0:
        return list(catalog.generic(modules))
    return catalog.choose(options.generic, options.seed, modules)


def _run(mutants: Sequence[Mutant], options: argparse.Namespace) -> int:
    kinds = tuple(options.kinds.split(","))
    if unknown := set(kinds) - set(KINDS):
        print(f"scripts/mutants: there are no {', '.join(sorted(unknown))} tests; choose of {', '.join(KINDS)}")
        return 2
    state = State(options.state, kinds=kinds, seeds=options.seeds)
    results: list[dict[str, Any]] = []
    copy = WorkingCopy(ROOT, ROOT / ".corral" / "mutants")
    try:
        trial = Trial(copy, kinds=kinds, seeds=options.seeds, jobs=options.jobs)
        for mutant in mutants:
            began = time.monotonic()
            verdict = None if options.again else state.find(mutant)
            known = verdict is not None
            if verdict is None:
                verdict = trial.run(mutant)
                state.put(mutant, verdict)
            results.append(_result(mutant, verdict))
            if not options.json:
                _print_result(mutant, verdict, None if known else time.monotonic() - began)
    finally:
        copy.close()
    survivors = [each["name"] for each in results if not each["caught_by"]]
    if options.json:
        print(json.dumps({"mutants": results, "survivors": survivors}, indent=2))
    else:
        print(f"{len(results) - len(survivors)} of {len(results)} caught" + "".join(f"\n  {n}" for n in survivors))
    return 1 if survivors else 0


def _result(mutant: Mutant, verdict: Verdict) -> dict[str, Any]:
    return {
        "name": mutant.name,
        "module": mutant.module,
        "caught_by": verdict.caught_by,
        "why": verdict.why,
        "unsure": list(verdict.unsure),
        "diff": mutant.diff(),
    }


def _print_result(mutant: Mutant, verdict: Verdict, took_s: float | None) -> None:
    when = "known already" if took_s is None else f"{took_s:.0f} s"
    if verdict.survived:
        print(f"SURVIVED {mutant.name} ({when})\n{mutant.diff()}", flush=True)
    else:
        print(f"caught   {mutant.name} by {verdict.caught_by} ({when}): {verdict.why}", flush=True)
    for test in verdict.unsure:
        print(f"         not counted, it fails without the mutant, too: {test}", flush=True)


def _print_list(mutants: Sequence[Mutant], *, as_json: bool) -> None:
    faults: dict[str, PlantedFault] = {fault.name: fault for fault in PLANTED}
    rows = []
    for mutant in mutants:
        fault = faults.get(mutant.name)
        row: dict[str, Any] = {"name": mutant.name, "module": mutant.module, "breaks": fault.breaks if fault else ""}
        rows.append(row | {"simulated": fault.simulated if fault else False})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['name']}  {row['module']}  {row['breaks']}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
