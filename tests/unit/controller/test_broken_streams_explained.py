"""Whether broken streams of a model are continued, in words."""

from __future__ import annotations

import pytest

from corral.contract.models import read_definition
from corral.controller.models.views import explain_resumption


@pytest.mark.parametrize(
    ("can", "text", "limited"),
    [
        ({"barn": True}, "continued on another replica", False),
        (
            {"barn": False},
            "not continued, though resume_streams is set: no build of b declares how it continues a text",
            True,
        ),
        ({"barn": True, "byre": False}, "but not from or to byre: the build of b there does not declare how", True),
        ({"barn": True} | {f"n{i}": False for i in range(7)}, "n0, n1, n2, n3, n4 and 2 more", True),
        ({}, "where a backend declares how", False),
    ],
)
def test_by_the_nodes_that_have_the_backend(can: dict[str, bool], text: str, limited: bool) -> None:
    explained = explain_resumption(read_definition({"name": "m", "backend": "b", "resume_streams": True}), can)
    assert text in explained.text
    assert explained.is_limited is limited


def test_nothing_is_said_of_a_model_that_does_not_ask() -> None:
    assert explain_resumption(read_definition({"name": "m", "backend": "b"}), {"barn": False}) == ("", False)
