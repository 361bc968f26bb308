"""Modules, classes and log lines that documents mention exist. Links are `test_doc_links.py`'s."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "adr")]
TOUR = ROOT / "docs" / "tour.md"

_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_CLASS = re.compile(r"(?<![a-z])[A-Z][a-z]+[A-Z]\w+")
_MODULE = re.compile(r"[\w-]+(?:/[\w-]+)+\.(?:py|js|html)(?!\w)")


@lru_cache
def files() -> frozenset[str]:
    folders = ("src", "tests", "bench", "backends", "scripts")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return frozenset(str(path.relative_to(ROOT)) for path in found)


def is_there(path: str) -> bool:
    """Documents leave out leading folders where a path is clear without them."""
    return any(name == path or name.endswith(f"/{path}") for name in files())


def modules_in(page: Path) -> set[str]:
    """In code spans and in diagrams; placeholders such as `NNNN_add_zone.py` are not modules."""
    return {path for path in _MODULE.findall(page.read_text()) if "NNNN" not in path}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_a_page_mentions_exist(page: Path) -> None:
    assert sorted(path for path in modules_in(page) if not is_there(path)) == []


@lru_cache
def code() -> str:
    return "".join(path.read_text() for folder in ("src", "tests") for path in sorted((ROOT / folder).rglob("*.py")))


@lru_cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", code()))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "wire"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_classes_that_a_page_mentions_exist(page: Path) -> None:
    """As a word of the code; the wire reference also names messages that only LocalAI has."""
    spans = [span for span in _CODE_SPAN.findall(page.read_text()) if not span.startswith("serve(")]  # an example
    assert sorted({name for span in spans for name in _CLASS.findall(span)} - words()) == []


def log_lines() -> list[str]:
    """The last column of the table of states in the tour, and lines that are said to be logged."""
    text = TOUR.read_text()
    section = text.partition("## A load hangs")[2].partition("\n## ")[0]
    table = section.partition("| state | waits for |")[2].partition("\n\n")[0]
    rows = [row.rsplit("|", 2)[1] for row in table.splitlines()[2:]]
    logged = re.findall(r"logs\s+`([^`]+)`", text)
    return [*logged, *(span for row in rows for span in _CODE_SPAN.findall(row))]


def test_log_lines_of_the_tour_are_logged() -> None:
    lines = log_lines()
    assert len(lines) > 10
    assert [line for line in lines if f'"{line}' not in code()] == []
