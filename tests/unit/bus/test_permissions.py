from __future__ import annotations

from collections.abc import Callable

import pytest

from corral.bus.permissions import Permissions, covers, localai_node_permissions, matches, node_permissions


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.b", "a", False),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.*.c", "a.b.c", True),
        ("_INBOX.>", "_INBOX_x.y", False),
    ],
)
def test_a_subscription_hears(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("nodes.a.>", "nodes.a.backend.*", True),
        ("nodes.a.>", "nodes.*.backend.stop", False),
        ("nodes.a.>", "nodes.a.>", True),
        ("nodes.a.>", "nodes.>", False),
        ("nodes.*.load", "nodes.*.load", True),
        ("nodes.a.load", "nodes.*.load", False),
        ("nodes.*", "nodes.>", False),
        (">", ">", True),
        ("a.*.>", "a.b.c.d", True),
        ("a.*.>", "a.b", False),
    ],
)
def test_a_permission_covers(wide: str, narrow: str, expected: bool) -> None:
    assert covers(wide, narrow) is expected


def test_what_a_node_may_do() -> None:
    own = node_permissions("a", reply_ttl_s=1)
    assert own.may_publish("nodes.a.heartbeat")
    assert own.may_publish("nodes.a.backend.install.op.progress")
    assert not own.may_publish("nodes.a.backend.install")
    assert not own.may_publish("nodes.b.heartbeat")
    assert not own.may_publish("_INBOX_a.x")
    assert own.may_subscribe("nodes.a.backend.install")
    assert own.may_subscribe("_INBOX_a.x.*")
    assert not own.may_subscribe("nodes.*.backend.install")
    assert not own.may_subscribe("_INBOX.>")


@pytest.mark.parametrize("permissions", [node_permissions, localai_node_permissions])
def test_a_node_hears_nothing_that_it_can_say(permissions: Callable[..., Permissions]) -> None:
    """Or it could send itself a message whose reply subject is somebody else's, and then "answer" there."""
    own = permissions("a", reply_ttl_s=60)
    for said in own.publish:
        assert not own.may_receive(said)
        assert not own.may_subscribe(said)
    assert own.may_subscribe("nodes.a.>")
    assert own.may_receive("nodes.a.backend.install")
    assert own.may_receive("nodes.a.files.ensure")
