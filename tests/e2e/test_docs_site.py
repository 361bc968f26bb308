"""`scripts/docs` builds the site of the documents, and refuses links that lead nowhere and pages without a link."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # its packages come from the package index


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([root / "scripts" / "docs", site], capture_output=True, text=True, timeout=280)


def test_the_site_has_every_page(tmp_path: Path) -> None:
    ran = build(ROOT, tmp_path / "site")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    built = {page.parent.relative_to(tmp_path / "site") for page in (tmp_path / "site").rglob("index.html")}
    assert [str(page) for page in pages if page.name != "README.md" and page.with_suffix("") not in built] == []
    assert "Decision records" in (tmp_path / "site" / "adr" / "index.html").read_text()
    outside = (tmp_path / "site" / "index.html").read_text()
    assert 'src="http' not in outside
    assert "fonts.g" not in outside


@pytest.mark.parametrize(
    ("page", "text", "why"),
    [
        ("lonely.md", "# Lonely\n", "no link leads to lonely.md"),
        ("tour.md", "# Tour\n\n[gone](how-to/gone.md)\n", "how-to/gone.md"),
        ("tour.md", "# Tour\n\n[gone](glossary.md#no-such-heading)\n", "no-such-heading"),
    ],
)
def test_what_leads_nowhere_is_an_error(tmp_path: Path, page: str, text: str, why: str) -> None:
    copy = tmp_path / "copy"
    for folder in ("docs", "scripts", "requirements"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / ".venv").symlink_to(ROOT / ".venv")
    (copy / "docs" / page).write_text(text)
    ran = build(copy, tmp_path / "site")
    assert ran.returncode != 0
    assert why in ran.stdout + ran.stderr
