"""kill -9 right before every single call that changes the disk, then a start: the old or the new version is whole, and
nothing else is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def crash(scenario: str, folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.crash_driver", scenario, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [report for report in reports if "failed" in report]
    assert [report["killed"] for report in reports] == [True] * (len(reports) - 1) + [False]
    assert len(reports) > 5, "hardly anything was changed: the faults are put in at the wrong place"
    return reports


def check_nothing_is_left(report: dict[str, Any]) -> None:
    """Every version in the folder has its record and its list; nothing is hidden, half written or being removed."""
    files = [path for path in report["files"] if path != ".sequence"]
    hidden = [path for path in files if any(part.startswith(".") for part in path.split("/"))]
    assert hidden == []
    versions = {path.split("/")[2] for path in files if path.startswith("demo/versions/")}
    for version in versions:
        plain = version.removesuffix(".json").removesuffix(".tree")
        assert {plain, f"{plain}.json", f"{plain}.tree"} <= versions, f"{version} is half there"
    assert report["whole"]


@pytest.mark.parametrize(
    ("scenario", "texts", "rows"),
    [
        ("install", ["", "new"], [[], ["demo"], ["demo", "meta"]]),
        ("upgrade", ["old", "new"], [["demo", "meta"]]),
        ("aside", ["old"], [["demo", "meta"]]),
        ("switch", ["old", "new"], [["demo", "meta"]]),
        ("rollback", ["old", "older"], [["demo", "meta"]]),
        ("delete", ["old", ""], [["demo", "meta"], ["demo"], []]),
        ("flat", ["old"], [["demo"]]),
    ],
)
def test_killed_at_every_step(tmp_path: Path, scenario: str, texts: list[str], rows: list[list[str]]) -> None:
    reports = crash(scenario, tmp_path)
    for report in reports:
        check_nothing_is_left(report)
        assert report["text"] in texts, report
        assert report["rows"] in rows, report
    # From the old state to the new one, once, and never back.
    seen = [texts.index(report["text"]) for report in reports]
    assert seen == sorted(seen)
    assert reports[-1]["text"] == texts[-1]
    assert reports[-1]["rows"] == rows[-1]
    if scenario in ("upgrade", "switch", "rollback"):
        assert all(len(report["previous"]) >= 1 for report in reports)  # there is always a way back
