"""Truth values as definitions of models write them."""

from __future__ import annotations

import pytest

from corral.contract.models import as_flag, read_definition
from corral.kit.errors import Invalid


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (True, True),
        (False, False),
        ("yes", True),
        ("on", True),
        ("Y", True),
        ("no", False),
        ("OFF", False),
        ("n", False),
        ("true", None),
        ("oN", None),
        ("", None),
        (1, None),
    ],
)
def test_words_that_localai_takes_for_truth_values(written: object, found: bool | None) -> None:
    assert as_flag(written) is found


def test_a_definition_with_such_words() -> None:
    definition = read_definition({"name": "m", "backend": "b", "embeddings": "yes", "pinned": "off"})
    assert (definition.embeddings, definition.pinned) == (True, False)
    with pytest.raises(Invalid, match="embeddings is true or false"):
        read_definition({"name": "m", "backend": "b", "embeddings": "maybe"})
