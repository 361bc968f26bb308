"""Tokens of the playground at the gateway: what they open, and every way of forging, keeping or misusing one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corral.contract.codec import decode, encode
from corral.contract.playground import PlaygroundClaims, session_id, token_text
from corral.contract.view import FleetView
from corral.gateway.http.auth import authenticate, authenticate_fresh
from corral.gateway.responses import Response
from corral.gateway.view.fleet import Client, Fleet, prepare_fleet
from corral.kit.signing import Signer

SIGNER = Signer(Signer.new_private_key())
NOON = 1_000_000.0
SESSION = session_id("hash-of-a-session")


def fleet(*, sessions: bool = True, signing_key: str = SIGNER.public_key, role: str = "inference", **key: Any) -> Fleet:
    secret_hash = "ab" * 32
    view = {
        "revision": 1,
        "keys": [{"id": "k1", "secret_hash": secret_hash, "role": role, "models": ["small"], **key}],
        "nodes": [],
        "models": [{"id": "small"}, {"id": "large"}],
        "signing_key": signing_key,
        "sessions": [{"id": SESSION, "key_id": "k1"}] if sessions else [],
    }
    return prepare_fleet(decode(FleetView, json.dumps(view).encode()))


def token(signer: Signer = SIGNER, **changes: Any) -> str:
    claims = {"sub": "k1", "aud": "playground", "session": SESSION, "exp": int(NOON) + 300} | changes
    return "cp_" + signer.sign(encode(claims))


def noon() -> float:
    return NOON


def ask(one: Fleet, secret: str, header: bytes = b"authorization") -> Client | Response:
    value = b"Bearer " + secret.encode() if header == b"authorization" else secret.encode()
    return authenticate(one, [(header, value)], noon)


def code_of(answer: Client | Response) -> str:
    assert isinstance(answer, Response)
    assert answer.status == 401
    return str(json.loads(answer.body)["error"]["code"])


def test_a_token_has_the_rights_of_its_key_for_inference_until_it_expires() -> None:
    client = ask(fleet(), token())
    assert isinstance(client, Client)
    assert (client.key_id, client.may_infer, client.models) == ("k1", True, frozenset({"small"}))
    assert client.expires_at == NOON + 300


def test_it_ends_no_later_than_its_key() -> None:
    client = ask(fleet(expires_at=NOON + 7), token())
    assert isinstance(client, Client)
    assert client.expires_at == NOON + 7
    assert code_of(ask(fleet(expires_at=NOON - 1), token())) == "expired_api_key"


def test_it_watches_nothing_even_of_an_admin() -> None:
    client = ask(fleet(role="admin"), token())
    assert isinstance(client, Client)
    assert (client.may_infer, client.may_watch) == (True, False)


def test_of_a_viewer_it_would_infer_nothing() -> None:
    client = ask(fleet(role="viewer"), token())
    assert isinstance(client, Client)
    assert not client.may_infer


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": ""},
        {"aud": "*"},
        {"aud": "controllers"},
        {"aud": "a-node"},
        {"exp": int(NOON) + 3600},  # lives longer than any we sign
        {"exp": 2**62},
        {"session": session_id("another")},
        {"session": ""},
        {"session": "hash-of-a-session"},  # the hash itself is no session of a token
        {"sub": "k2"},
        {"sub": ""},
    ],
)
def test_other_claims_open_nothing(changes: dict[str, Any]) -> None:
    assert code_of(ask(fleet(), token(**changes))) == "invalid_playground_token"


def test_an_absent_audience_is_no_audience() -> None:
    claims = {"sub": "k1", "session": SESSION, "exp": int(NOON) + 300}
    assert code_of(ask(fleet(), "cp_" + SIGNER.sign(encode(claims)))) == "invalid_playground_token"


@pytest.mark.parametrize("exp", [int(NOON), int(NOON) - 1, 0, -5])
def test_an_expired_token_says_so(exp: int) -> None:
    assert code_of(ask(fleet(), token(exp=exp))) == "expired_playground_token"


def test_a_token_that_was_valid_expires_in_the_same_view() -> None:
    one, late = fleet(), token(exp=int(NOON) + 300)
    assert isinstance(ask(one, late), Client)
    answer = authenticate(one, [(b"authorization", b"Bearer " + late.encode())], lambda: NOON + 300)
    assert code_of(answer) == "expired_playground_token"


def test_another_key_signs_nothing_here() -> None:
    assert code_of(ask(fleet(), token(Signer(Signer.new_private_key())))) == "invalid_playground_token"


def test_without_a_signing_key_no_token_is_valid() -> None:
    for signing_key in ("", "%%%", "AAAA"):
        assert code_of(ask(fleet(signing_key=signing_key), token())) == "invalid_playground_token"


def test_every_tampered_character_is_noticed() -> None:
    whole = token()
    for place in range(3, len(whole) - 1):  # the last character of base64 has bits that mean nothing
        changed = whole[:place] + ("A" if whole[place] != "A" else "B") + whole[place + 1 :]
        assert isinstance(ask(fleet(), changed), Response), place


@pytest.mark.parametrize(
    "broken", ["cp_", "cp_.", "cp_a.b", "cp_" + "A" * 100_000, "cp_é.é", "CP_" + token()[3:], token()[3:]]
)
def test_what_is_no_token_is_refused(broken: str) -> None:
    assert code_of(ask(fleet(), broken)) in ("invalid_playground_token", "invalid_api_key")


@pytest.mark.parametrize("header", [b"x-api-key", b"cookie", b"x-corral-token", b"proxy-authorization"])
def test_only_authorization_carries_it(header: bytes) -> None:
    assert isinstance(ask(fleet(), token(), header), Response)
    assert isinstance(ask(fleet(), f"corral_session={token()}", header), Response)


def test_x_api_key_does_not_help_a_token_in_authorization() -> None:
    headers = [(b"x-api-key", token().encode()), (b"authorization", b"Basic " + token().encode())]
    assert isinstance(authenticate(fleet(), headers, noon), Response)


def test_a_token_ends_with_its_session() -> None:
    used = token()
    assert isinstance(ask(fleet(), used), Client)
    assert code_of(ask(fleet(sessions=False), used)) == "invalid_playground_token"


def test_no_refusal_repeats_the_token() -> None:
    answer = ask(fleet(sessions=False), token())
    assert isinstance(answer, Response)
    assert token()[3:40].encode() not in answer.body


class Views:
    """A controller that knows one more session when it is asked again."""

    def __init__(self, *views: Fleet) -> None:
        self._views = list(views)
        self.refreshed = 0

    @property
    def fleet(self) -> Fleet | None:
        return self._views[0]

    def server_now(self) -> float:
        return NOON

    async def refresh(self) -> None:
        self.refreshed += 1
        if len(self._views) > 1:
            self._views.pop(0)


async def test_a_session_that_began_a_moment_ago_is_looked_for_again() -> None:
    views = Views(fleet(sessions=False), fleet())
    found = await authenticate_fresh(views, [(b"authorization", b"Bearer " + token().encode())], retry_after_s=1)
    assert not isinstance(found, Response)
    assert found[1].key_id == "k1"
    assert views.refreshed == 1


@pytest.mark.parametrize("bad", ["cp_a.b", token(exp=int(NOON) - 1), token(aud="*")])
async def test_nobody_makes_the_gateway_read_again_with_a_token_that_was_not_signed_for_it(bad: str) -> None:
    views = Views(fleet(sessions=False))
    found = await authenticate_fresh(views, [(b"authorization", b"Bearer " + bad.encode())], retry_after_s=1)
    assert isinstance(found, Response)
    assert views.refreshed == 0


def test_what_the_wire_says() -> None:
    claims = PlaygroundClaims("k1", "playground", SESSION, 5)
    assert json.loads(encode(claims)) == {"sub": "k1", "aud": "playground", "session": SESSION, "exp": 5}
    assert token_text("a.b") == "cp_a.b"
