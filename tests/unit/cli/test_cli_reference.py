"""docs/reference/cli.md says what the commands say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from corral.cli.commands import COMMANDS


def test_the_page_is_up_to_date() -> None:
    path = Path(__file__).parents[3] / "scripts" / "_cli_reference.py"
    spec = importlib.util.spec_from_file_location("_cli_reference", path)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = generator.render()
    assert generator.PAGE.read_text() == page, "run .venv/bin/python scripts/_cli_reference.py"
    assert all(f"## corral {name}" in page for name in COMMANDS)
