"""Names are terms of the field (docs/contributing.md, "Vocabulary"): no word to avoid, no class name three times.

`scripts/codebase --list words` and `--list classes` name the places.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripts import ROOT, load_script

codebase = load_script("codebase")


@pytest.fixture(scope="module")
def modules() -> Any:
    return codebase.read_modules(ROOT)


def test_no_class_name_is_used_three_times(modules: Any) -> None:
    assert codebase.find_common_class_names(modules) == {}, "two classes have this name already: qualify it"


def test_no_name_contains_a_word_to_avoid(modules: Any) -> None:
    assert [place for module in modules for _, place in codebase.forbidden_names(module)] == []
