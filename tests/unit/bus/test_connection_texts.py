"""What people get to read about a connection."""

from __future__ import annotations

import ssl

import nats.errors
import pytest

from corral.bus.connection import describe, redacted_url, split_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("bus.example.org", "nats://bus.example.org:4222"),
        ("tls://me:secret@bus.example.org:4443", "tls://bus.example.org:4443"),
        ("nats://token-only@h", "nats://h:4222"),
        ("nats://[::1]:4222", "nats://[::1]:4222"),
    ],
)
def test_a_shown_url_says_where_and_never_who(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


def test_credentials_in_a_url_are_taken_out_of_it() -> None:
    address, credentials = split_url("tls://me:p%40ss@bus.example.org:4443")
    assert address == "tls://bus.example.org:4443"
    assert (credentials.user, credentials.password) == ("me", "p@ss")
    assert split_url("127.0.0.1:4222")[0] == "nats://127.0.0.1:4222"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (nats.errors.Error("nats: 'Authorization Violation'"), "the server refuses our credentials"),
        (nats.errors.AuthorizationError(), "the server refuses our credentials"),
        (nats.errors.Error("nats: user authentication expired"), "our credentials have expired"),
        (nats.errors.Error("nats: user authentication revoked"), "our credentials were revoked"),
        (nats.errors.UnexpectedEOF(), "the server closed the connection"),
        (TimeoutError(), "no answer in time"),
        (ConnectionRefusedError(111, "Connection refused"), "[Errno 111] Connection refused"),
        (OSError(), "OSError"),
        (ssl.SSLCertVerificationError("bad"), "its certificate is not trusted"),
    ],
)
def test_an_error_is_one_line_for_a_person(error: Exception, text: str) -> None:
    assert describe(error).startswith(text)
    assert "\n" not in describe(error)
