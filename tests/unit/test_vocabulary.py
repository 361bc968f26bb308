"""Names are terms of the field (docs/contributing.md, "Vocabulary"): no word to avoid, no class name three times.

`scripts/codebase --list words` and `--list classes` name the places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.scripts import ROOT, load_script

# What is left to rename. An entry whose names are gone has to be taken out; none is ever added or raised.
COMMON_CLASS_NAMES: frozenset[str] = frozenset({})
WORDS: Mapping[str, int] = {
    "asked": 149,
    "listening": 13,
    "told": 237,
    "way": 18,
}

codebase = load_script("codebase")


@pytest.fixture(scope="module")
def modules() -> Any:
    return codebase.read_modules(ROOT)


def test_no_class_name_is_used_three_times(modules: Any) -> None:
    found = codebase.find_common_class_names(modules)
    new = {name: where for name, where in found.items() if name not in COMMON_CLASS_NAMES}
    assert not new, "a class name that two others have already: say whose it is in the name"
    done = COMMON_CLASS_NAMES - set(found)
    assert not done, f"used twice at most by now: take them out of COMMON_CLASS_NAMES: {sorted(done)}"


def test_no_name_contains_a_word_to_avoid(modules: Any) -> None:
    hits = [hit for module in modules for hit in codebase.forbidden_names(module)]
    found = Counter(word for word, _ in hits)
    more = {word for word, count in found.items() if count > WORDS.get(word, 0)}
    assert not more, "\n".join(sorted(place for word, place in hits if word in more))
    done = set(WORDS) - set(found)
    assert not done, f"no name contains them by now: take them out of WORDS: {sorted(done)}"
