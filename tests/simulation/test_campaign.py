"""`scripts/simulate`: its report counts every seed once, names violations, and continues where it was interrupted."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from tests.simulation import campaign
from tests.simulation.campaign import Campaign, Results, Run, planned, report, totals_of


def _line(seed: int, world: str = "fleet", **more: Any) -> dict[str, Any]:
    counted = {"faults": {"worker killed": 2}, "requests": {"asks": 3}, "commits": 10, "checked_states": 4}
    return {"world": world, "seed": seed, "cpu_s": 0.5, "node_s": 3600.0, "simulated_s": 900.0, **counted, **more}


def test_a_report_counts_each_wanted_seed_once() -> None:
    runs = planned(4, first=0)
    assert runs == [Run("fleet", 0), Run("fleet", 1), Run("fleet", 2), Run("fleet", 3), Run("transfers", 0)]
    totals = totals_of([_line(0), _line(1), _line(0, "transfers"), _line(77)], runs)
    assert (totals.seeds["fleet"], totals.seeds["transfers"]) == (2, 1)
    assert (totals.faults["worker killed"], totals.commits, totals.node_s) == (6, 30, 3 * 3600.0)
    text = report(totals, "cafe")
    assert "| simulated node-hours (running workers only) | 3 |" in text
    assert "| simulated time per CPU time | 1,800 × |" in text
    assert "| worker killed | 6 |" in text
    assert "| violations | 0 |" in text


def test_a_violated_seed_is_named_and_counts_nothing_else() -> None:
    broken = {"world": "fleet", "seed": 9, "cpu_s": 0.1, "violation": "2: two processes are routable"}
    totals = totals_of([_line(8), broken], planned(2, first=8))
    assert totals.commits == 10
    assert "| fleet 9 | 2: two processes are routable |" in report(totals, "cafe")


def test_results_of_other_code_and_a_torn_last_line_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    Results(path, "old").add(_line(1))
    assert Results(path, "old").done == {Run("fleet", 1)}
    with path.open("a") as file:
        file.write('{"world": "fleet", "se')  # killed while it wrote
    assert Results(path, "old").done == {Run("fleet", 1)}
    newer = Results(path, "new")
    assert newer.done == set()
    assert newer.discarded == 1


def test_seeds_run_in_processes_of_their_own_and_an_interrupted_campaign_continues(
    template: Path, tmp_path: Path
) -> None:
    runs = [Run("fleet", 3), Run("transfers", 3), Run("fleet", 5)]
    results, out = Results(tmp_path / "state.jsonl", "tree"), io.StringIO()
    Campaign(runs[:2], results, 2, out).run(template)
    assert results.done == set(runs[:2])
    continued = Results(tmp_path / "state.jsonl", "tree")
    Campaign([run for run in runs if run not in continued.done], continued, 1, out).run(template)
    totals = totals_of(continued.lines, runs)
    assert sum(totals.seeds.values()) == 3
    assert totals.violations == []
    assert totals.faults.total() > 0
    assert totals.checked_states > 0
    again = campaign.run_seed(Run("fleet", 3), template)
    first = next(line for line in continued.lines if (line["world"], line["seed"]) == ("fleet", 3))
    timeless = {key: value for key, value in again.items() if key != "cpu_s"}
    assert json.loads(json.dumps(timeless)) == {key: value for key, value in first.items() if key != "cpu_s"}
    assert "1 of 1 seeds, 0 violations" in out.getvalue()
