"""What the system says about an error, in few words."""

from __future__ import annotations

import errno
import socket

import pytest

from corral.kit.errors import reason_of


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.1', 50050)"), "Connection refused"),
        (OSError(errno.EHOSTUNREACH, "whatever a library says"), "No route to host"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (socket.gaierror(8, "nodename nor servname provided"), "nodename nor servname provided"),
        (OSError("Multiple exceptions: …"), "Multiple exceptions: …"),
        (OSError(), "OSError"),
    ],
)
def test_a_reason_is_short_and_the_systems_own(error: OSError, words: str) -> None:
    assert reason_of(error) == words
