"""docs/reference/faults.md names tests; they are there, and every fault has one."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "reference" / "faults.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| fault |", "| who |"))
]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@lru_cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("row", ROWS, ids=[row.strip("| ").partition(" |")[0] for row in ROWS])
def test_every_fault_has_tests_that_are_there(row: str) -> None:
    named = _TEST.findall(row)
    assert named, "no test"
    assert len(named) == row.count("::"), "a test is not written as `file::name`"
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert name in names_in(file), f"{file}::{name}"


@pytest.mark.parametrize(
    "fault",
    [
        *("registry down", "200 kB/s", "mid-layer", "wrong digest", "no build for the platform", "`../`", "10 GB"),
        *("full disk", "unknown backend", "offline for a day", "gone in mid-install", "lost result", "doubled order"),
        *("accepted and died", "5 s for an install", "LocalAI's worker", "LocalAI's controller", "joins later"),
        *("controller, NATS", "PostgreSQL", "one of two controllers", "behind the worker's back"),
        *("install and delete crossing", "while the process serves", "new process crashes", "URI of one's own"),
        *("unknown model", "doubled `model`", "100 MB", "key revoked in mid-stream", "dies in mid-stream"),
        *("hangs without closing", "unplugged in mid-stream", "500 streams", "100 cold requests", "crashes at load"),
        *("each phase of a load", "fit only one at a time", "is another model", "20 GB model", "busy for minutes"),
    ],
)
def test_each_is_told_once(fault: str) -> None:
    assert sum(fault in row.strip("| ").partition(" | ")[0] for row in ROWS) == 1
