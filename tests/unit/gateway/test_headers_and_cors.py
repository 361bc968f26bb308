"""Which headers pass, and what browsers are told."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from corral.contract.http import Request
from corral.gateway.http.controller_relay import controller_path
from corral.gateway.http.cors import Cors
from corral.gateway.http.headers import HIDDEN_FROM_CONTROLLER, HIDDEN_FROM_REPLICA, for_controller, for_replica


class NoBody:
    length: int | None = 0

    async def read(self, limit: int) -> bytes:
        return b""

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b""


def request(
    *headers: tuple[bytes, bytes], method: bytes = b"GET", secure: bool = False, peer: str | None = "192.0.2.7"
) -> Request:
    return Request(
        method=method,
        path=b"/api/nodes",
        headers=headers,
        http_version="1.1",
        peer=None if peer is None else (peer, 40000),
        secure=secure,
        request_id="r1",
        body=NoBody(),
    )


@pytest.mark.parametrize(
    "name",
    [b"x-corral-gateway", b"x-corral-client", b"x-corral-anything", b"x-forwarded-for", b"x-forwarded-proto"],
)
def test_what_only_we_may_say_is_taken_away(name: bytes) -> None:
    assert HIDDEN_FROM_CONTROLLER.drops(name)
    assert HIDDEN_FROM_REPLICA.drops(name)


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"cookie", b"origin"])
def test_a_clients_secrets_reach_the_controller_and_no_replica(name: bytes) -> None:
    assert not HIDDEN_FROM_CONTROLLER.drops(name)
    assert HIDDEN_FROM_REPLICA.drops(name)


@pytest.mark.parametrize("name", [b"host", b"content-type", b"accept", b"user-agent", b"x-csrf-token", b"x-other"])
def test_the_rest_goes_on(name: bytes) -> None:
    assert not HIDDEN_FROM_CONTROLLER.drops(name)
    assert not HIDDEN_FROM_REPLICA.drops(name)


def test_the_gateway_vouches_for_the_client() -> None:
    given = request((b"host", b"fleet.example:8080"), secure=True)
    assert dict(for_controller(given, b"ck_gateway")) == {
        b"x-corral-gateway": b"ck_gateway",
        b"x-corral-client": b"192.0.2.7",
        b"x-forwarded-proto": b"https",
        b"x-forwarded-host": b"fleet.example:8080",
    }
    assert dict(for_replica(b"signed")) == {b"authorization": b"Bearer signed"}


@pytest.mark.parametrize(
    ("peer", "told"),
    [("::ffff:192.0.2.7", b"192.0.2.7"), ("fe80::1%eth0", b"fe80::1"), ("2001:db8::1", b"2001:db8::1")],
)
def test_one_client_has_one_spelling(peer: str, told: bytes) -> None:
    assert dict(for_controller(request(peer=peer), b"k"))[b"x-corral-client"] == told


def test_without_an_address_none_is_claimed() -> None:
    assert b"x-corral-client" not in dict(for_controller(request(peer=None), b"k"))


@pytest.mark.parametrize(
    ("path", "there"),
    [
        (b"/api/nodes?limit=2", b"/api/nodes?limit=2"),
        (b"/controller/healthz", b"/healthz"),
        (b"/controller/readyz?full", b"/readyz?full"),
        (b"/controller/metrics", b"/metrics"),
        (b"/controller/other", b"/controller/other"),
        (b"/", b"/"),
    ],
)
def test_the_controllers_own_health_stands_under_its_name(path: bytes, there: bytes) -> None:
    assert controller_path(path) == there


def test_cors_is_off_by_default() -> None:
    asked = request((b"origin", b"https://a.example"), (b"access-control-request-method", b"POST"), method=b"OPTIONS")
    assert Cors().headers(asked) == ()
    assert Cors().preflight(asked) is None


def test_only_listed_origins_are_let_in() -> None:
    cors = Cors(("https://a.example/",))
    assert (b"access-control-allow-origin", b"https://a.example") in cors.headers(
        request((b"origin", b"https://a.example"))
    )
    for origin in (b"https://b.example", b"https://a.example.evil", b"null"):
        assert cors.headers(request((b"origin", origin))) == ((b"vary", b"Origin"),)
    anybody = dict(Cors(("*",)).headers(request((b"origin", b"https://b.example"))))
    assert anybody[b"access-control-allow-origin"] == b"*"
    for name in (b"X-Request-Id", b"Retry-After", b"X-Corral-Model", b"X-Corral-Node"):  # else no page can read them
        assert name in anybody[b"access-control-expose-headers"].split(b", ")


def test_a_preflight_is_answered_without_a_key() -> None:
    cors = Cors(("https://a.example",), max_age_s=60)
    asked = request(
        (b"origin", b"https://a.example"),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", b"authorization,x-stainless-os"),
        method=b"OPTIONS",
    )
    answer = cors.preflight(asked)
    assert answer is not None
    assert answer.status == 204
    assert dict(answer.headers) == {
        b"access-control-allow-methods": b"GET, POST, OPTIONS",
        b"access-control-allow-headers": b"authorization,x-stainless-os",
        b"access-control-max-age": b"60",
    }
    assert cors.preflight(request(method=b"OPTIONS")) is None
    assert cors.preflight(request((b"access-control-request-method", b"GET"))) is None
