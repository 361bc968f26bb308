"""Links in the documents, and paths of documents in the code, lead to a page and a heading that exist."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = ("src", "tests", "bench", "backends", "scripts")
SKIPPED = {".venv", "__pycache__", "node_modules", ".git", ".corral", ".mypy_cache", ".ruff_cache", ".pytest_cache"}

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE_SPAN = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)
_LINK_TEXT = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_CITED = re.compile(r"\bdocs/[\w./-]+?\.md(?:#[\w-]+)?(?:, #[\w-]+)*")
# How documents that are not part of the repository were cited.
_NOT_HERE = [
    re.compile(pattern)
    for pattern in (
        r"\bDESIGN(?: §|\.md|'s)",
        r"\b[Cc]ontract[:,]? \(?(?:nats|http|grpc|files|gallery)\.md",
        r"\b(?:nats|http|grpc|files|gallery)\.md §",
        r"§\d",
        r"\b[Ss]eed row|\brow [A-Z]\d+ of the seeds",
        r"(?:STYLE|PEERS|SEED-CHECKLIST)\.md|\.\./shared/",
    )
]


def text_files() -> Iterator[Path]:
    for place in (*CODE, "docs", "changes"):
        for path in sorted((ROOT / place).rglob("*")):
            if path.is_file() and path != Path(__file__) and not SKIPPED.intersection(path.parts):
                yield path
    yield from (ROOT / name for name in ("README.md", "pyproject.toml"))


@lru_cache(maxsize=4096)
def read(path: Path) -> str:
    """Empty for what is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@lru_cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors as GitHub makes them: lower case, no punctuation, blanks as hyphens, repeats numbered."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", read(page))):
        plain = _LINK_TEXT.sub(r"\1", heading).replace("`", "").strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return frozenset(found)


def links(page: Path) -> list[str]:
    text = _CODE_SPAN.sub("", _FENCE.sub("", read(page)))
    targets = [link or image for link, image in _LINK.findall(text)]
    return [target for target in targets if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def why_broken(target: str, base: Path, page: Path) -> str:
    """`target` counts from `base`; an anchor alone is one of `page`. Empty for a link that leads somewhere."""
    path, _, anchor = unquote(target).partition("#")
    there = (base / path).resolve() if path else page
    if not there.is_relative_to(ROOT):
        return f"{target}: outside the repository"
    if not there.exists():
        return f"{target}: no such file"
    if anchor and anchor not in anchors(there):
        return f"{target}: no such heading"
    return ""


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("## The worker's HTTP port", "the-workers-http-port"),
        ("### `corral:` the manifest", "corral-the-manifest"),
        ("### metadata.json", "metadatajson"),
        ("## 8. Automation is limited", "8-automation-is-limited"),
        ("## HEAD, GET, temp, list", "head-get-temp-list"),
        ("## [Linked](x.md) heading", "linked-heading"),
        ("## snake_case × 2", "snake_case--2"),
    ],
)
def test_anchors_are_those_of_github(tmp_path: Path, heading: str, anchor: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{heading}\n\n{heading}\n\n```\n# not a heading\n```\n")
    assert anchors(page) == {anchor, f"{anchor}-1"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert [why for target in links(page) if (why := why_broken(target, page.parent, page))] == []


def test_pages_that_code_cites_exist() -> None:
    broken = []
    for path in text_files():
        if path.relative_to(ROOT).parts[0] not in CODE:
            continue
        for cited in _CITED.findall(read(path)):
            page, *more = cited.split(", ")
            targets = [page, *(page.partition("#")[0] + anchor for anchor in more)]
            broken += [f"{path.relative_to(ROOT)}: {why}" for each in targets if (why := why_broken(each, ROOT, path))]
    assert broken == []


def test_no_file_cites_documents_outside_the_repository() -> None:
    found = []
    for path in text_files():
        for number, line in enumerate(read(path).splitlines(), 1):
            if any(pattern.search(line) for pattern in _NOT_HERE):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert found == []


@pytest.mark.parametrize(
    "words",
    ["(DESIGN §7)", "contract http.md", "(contract: nats.md)", "files.md §7", "the contract's §3.1", "seed row L12"],
)
def test_such_citations_would_be_found(words: str) -> None:
    assert any(pattern.search(words) for pattern in _NOT_HERE)


def test_the_index_reaches_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    assert "docs/README.md" in links(ROOT / "README.md")
    listed = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in (ROOT / "README.md", index)
        for target in links(page)
    }
    folders = [ROOT / "docs" / name for name in ("reference", "how-to", "explanation")]
    pages = [page for folder in folders for page in sorted(folder.rglob("*.md"))]
    assert [str(page.relative_to(ROOT)) for page in pages if page not in listed] == []
    assert ROOT / "docs" / "adr" in listed


def test_the_readme_links_every_reference_page() -> None:
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in links(ROOT / "README.md")}
    pages = sorted((ROOT / "docs" / "reference").rglob("*.md"))
    assert [str(page.relative_to(ROOT)) for page in pages if page not in linked] == []


def test_the_readme_maps_every_package() -> None:
    source = ROOT / "src" / "corral"
    text = read(ROOT / "README.md")
    found = [
        path.parent
        for parent in (source, source / "controller", source / "worker")
        for path in parent.glob("*/__init__.py")
    ]
    assert [
        str(path.relative_to(source)) for path in found if f" {path.name}/" not in text and f"({path.name}/" not in text
    ] == []


def test_operators_read_no_bus_subjects() -> None:
    subject = re.compile(
        r"\bnodes\.[{<]|\b(?:backend\.(?:install|upgrade|list|delete|stop|cancel|verify)|model\.(?:unload|stop|delete)"
        r"|models\.(?:running|keep)|replica\.(?:start|stop)|files\.(?:ensure|stage|temp|listdir))\b"
        r"|\bcorral\.(?:view|work|peers|gateways)\.|_INBOX"
    )
    pages = sorted((ROOT / "docs" / "how-to").glob("*.md"))
    assert {page.name: subject.findall(read(page)) for page in pages if subject.search(read(page))} == {}
