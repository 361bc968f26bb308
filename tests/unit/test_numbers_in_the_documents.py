"""Numbers that documents state are those of the code; decisions are numbered without a gap."""

from __future__ import annotations

from pathlib import Path

from corral.controller.settings import ControllerSettings
from corral.store.engine.transactions import StoreOptions

ROOT = Path(__file__).parents[2]


def test_what_the_readme_says_of_the_guard() -> None:
    assert (
        f"({ControllerSettings().health.guard_share} %, a setting) falls silent at once"
        in (ROOT / "README.md").read_text()
    )


def test_how_long_the_database_is_waited_for() -> None:
    options = StoreOptions()
    writers, readers = min(options.turn_wait_s, options.busy_timeout_s), options.turn_wait_s
    page = (ROOT / "docs" / "reference" / "store.md").read_text()
    assert f"writers {writers:g} s for their turn and another process's lock together, readers {readers:g} s" in page


def test_decisions_have_numbers_of_their_own_and_their_titles_agree() -> None:
    """A number that was set aside for a decision that nobody took stays free."""
    found = sorted((ROOT / "docs" / "adr").glob("*.md"))
    numbers = [int(path.name.partition("-")[0]) for path in found]
    assert len(set(numbers)) == len(numbers) > 30
    for number, path in zip(numbers, found, strict=True):
        assert path.name.startswith(f"{number:04}-"), path.name
        assert path.read_text().startswith(f"# {number}. "), path.name
