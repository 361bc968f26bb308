"""Backends × nodes in words: what is marked, what is counted, which columns of a large fleet are shown."""

from __future__ import annotations

from typing import Any

import pytest

from corral.contract.admin import BackendMatrix, MatrixCell, MatrixIntent, MatrixNode, MatrixRow
from corral.controller.web.list_filter import ListFilter
from corral.controller.web.matrix import matrix_of, todo_of


def node(name: str, **more: Any) -> MatrixNode:
    return MatrixNode(f"id-{name}", name, "healthy", **more)


def has(version: str = "1.0", **more: Any) -> MatrixCell:
    return MatrixCell(installed=True, version=version, **more)


def still(stage: str, **more: Any) -> MatrixCell:
    return MatrixCell(installed=False, intent=MatrixIntent("install", stage, **more))


def fleet(*rows: MatrixRow, names: tuple[str, ...] = ("attic", "barn", "loft")) -> BackendMatrix:
    return BackendMatrix(tuple(node(name) for name in names), rows)


def test_one_version_needs_no_number_and_several_are_counted() -> None:
    row = MatrixRow("vllm", {"id-attic": has(), "id-barn": has()})
    (line,) = matrix_of(fleet(row), ListFilter()).lines
    assert (line.installed, line.versions) == ("on 2 of 3 nodes", "1.0")
    mixed = MatrixRow("vllm", {"id-attic": has("2.0"), "id-barn": has(), "id-loft": has(drift=True)}, drift=True)
    (line,) = matrix_of(fleet(mixed), ListFilter()).lines
    assert line.versions == "1.0 on 2, 2.0 on 1"
    assert line.marks == (("drift", "1 differ"),)
    assert line.cells[2].marks == (("drift", "differs"),)


def test_without_a_version_the_digest_speaks() -> None:
    row = MatrixRow("own", {"id-attic": MatrixCell(installed=True, digest="sha256:0123456789abcdef")})
    assert [cell.version for cell in matrix_of(fleet(row), ListFilter()).lines[0].cells] == ["0123456789ab", "–", "–"]


@pytest.mark.parametrize(
    ("cell", "todo", "words"),
    [
        (still("waiting"), "waiting", "install waits"),
        (still("waiting", failures=2), "failing", "install fails"),
        (still("parked"), "failing", "install fails"),
        (still("sent", percentage=41.7), "moving", "install 41\u00a0%"),
        (still("sent", percentage=41.7, phase="extracting", failures=1), "moving", "extracting 41\u00a0%"),
    ],
)
def test_what_is_still_to_be_done(cell: MatrixCell, todo: str, words: str) -> None:
    assert todo_of(cell.intent) == todo
    shown = matrix_of(fleet(MatrixRow("vllm", {"id-barn": cell})), ListFilter())
    assert (shown.lines[0].cells[1].todo, shown.lines[0].cells[1].todo_words) == (todo, words)
    assert next(chip.count for chip in shown.chips if chip.only == todo) == 1


def test_a_chip_chooses_columns_and_rows() -> None:
    rows = (
        MatrixRow("mock", {"id-attic": has()}),
        MatrixRow("vllm", {"id-attic": has(outdated=True), "id-loft": has("2.0")}, True, "2.0"),
    )
    shown = matrix_of(fleet(*rows), ListFilter(only="outdated"))
    assert [column.name for column in shown.columns] == ["attic"]
    assert [(line.backend, line.newer) for line in shown.lines] == [("vllm", "update to 2.0")]
    assert (shown.updates, shown.updates_words) == (1, "1 update available")
    assert [column.name for column in matrix_of(fleet(*rows), ListFilter(find=" LO ")).columns] == ["loft"]
    assert len(matrix_of(fleet(*rows), ListFilter(only="something else")).columns) == 3, (
        "what nobody knows chooses nothing"
    )


def test_a_node_that_has_not_told_is_not_one_that_has_nothing() -> None:
    told, silent = node("attic"), node("barn", told=False)
    shown = matrix_of(BackendMatrix((told, silent), (MatrixRow("vllm", {}),)), ListFilter())
    assert [cell.version for cell in shown.lines[0].cells] == ["–", "?"]
    assert shown.silent == 1


@pytest.mark.parametrize(
    ("at", "first", "words", "previous", "following"),
    [
        (0, "node-000", "Nodes 1–24 of 60", None, "?at=24"),
        (30, "node-024", "Nodes 25–48 of 60", "", "?at=48"),
        (48, "node-048", "Nodes 49–60 of 60", "?at=24", None),
        (10_000, "node-048", "Nodes 49–60 of 60", "?at=24", None),
    ],
)
def test_a_large_fleet_is_paged(at: int, first: str, words: str, previous: str | None, following: str | None) -> None:
    names = tuple(f"node-{number:03}" for number in range(60))
    shown = matrix_of(fleet(MatrixRow("vllm", {f"id-{name}": has() for name in names}), names=names), ListFilter(at=at))
    assert shown.columns[0].name == first
    assert (shown.range, shown.previous, shown.next) == (words, previous, following)
    assert shown.lines[0].installed == "on 60 of 60 nodes", "counts are over all"


def test_what_was_looked_for_is_kept_from_page_to_page() -> None:
    assert ListFilter("drift", "a b&c", 24).query(at=48) == "?only=drift&find=a+b%26c&at=48"
    assert ListFilter().query() == ""
