"""Keys: who is let in, what their role opens, and the words of each refusal."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.codec import decode
from corral.contract.view import FleetView
from corral.gateway.http.auth import authenticate, read_secret
from corral.gateway.responses import Response
from corral.gateway.view.fleet import Client, Fleet, prepare_fleet


def hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def fleet(*keys: dict[str, object], models: tuple[str, ...] = ("small", "large")) -> Fleet:
    """Through the wire's own words, as the controller writes them."""
    view = {"revision": 7, "keys": keys, "nodes": [], "models": [{"id": name, "created": 5} for name in models]}
    return prepare_fleet(decode(FleetView, json.dumps(view).encode()))


def key(secret: str, role: str = "inference", **more: object) -> dict[str, object]:
    return {"id": f"id-{secret}", "secret_hash": hashed(secret), "role": role, **more}


def bearer(secret: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + secret.encode())]


def noon() -> float:
    return 1000.0


def refusal(answer: Client | Response) -> dict[str, object]:
    assert isinstance(answer, Response)
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error, dict)
    return {"status": answer.status, **error}


@pytest.mark.parametrize(
    ("headers", "secret"),
    [
        ([], None),
        ([(b"authorization", b"Bearer ck_abc")], b"ck_abc"),
        ([(b"authorization", b"bearer   ck_abc ")], b"ck_abc"),
        ([(b"authorization", b"Bearer ")], None),
        ([(b"authorization", b"Basic Y2s=")], None),
        ([(b"x-api-key", b"ck_abc")], b"ck_abc"),
        ([(b"x-api-key", b" ")], None),
        ([(b"x-api-key", b"one"), (b"authorization", b"Bearer two")], b"two"),
        ([(b"authorization", b"Basic Y2s="), (b"x-api-key", b"one")], b"one"),
        ([(b"cookie", b"authorization=ck_abc")], None),
    ],
)
def test_a_secret_is_read_from_either_header(headers: list[tuple[bytes, bytes]], secret: bytes | None) -> None:
    assert read_secret(headers) == secret


def test_a_known_key_is_let_in() -> None:
    client = authenticate(fleet(key("ck_one"), key("ck_two", "admin")), bearer("ck_two"), noon)
    assert isinstance(client, Client)
    assert (client.key_id, client.role, client.expires_at) == ("id-ck_two", "admin", math.inf)


@pytest.mark.parametrize(
    ("role", "infers", "lists", "watches"),
    [
        ("admin", True, True, True),
        ("inference", True, True, False),
        ("viewer", False, True, True),
        ("gateway", False, False, False),
        ("", False, False, False),
        ("something-new", False, False, False),
    ],
)
def test_what_each_role_opens(role: str, infers: bool, lists: bool, watches: bool) -> None:
    client = authenticate(fleet(key("ck_one", role)), bearer("ck_one"), noon)
    assert isinstance(client, Client)
    assert (client.may_infer, client.may_list, client.may_watch) == (infers, lists, watches)


def test_no_key_and_a_wrong_key_are_told_apart() -> None:
    one = fleet(key("ck_one"))
    assert refusal(authenticate(one, [], noon)) | {"message": ""} == {
        "status": 401,
        "message": "",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert refusal(authenticate(one, bearer("ck_other"), noon))["code"] == "invalid_api_key"


@pytest.mark.parametrize(("expires_at", "let_in"), [(1000.5, True), (1000.0, False), (999.0, False), (None, True)])
def test_a_key_ends_at_its_time(expires_at: float | None, let_in: bool) -> None:
    answer = authenticate(fleet(key("ck_one", expires_at=expires_at)), bearer("ck_one"), noon)
    if let_in:
        assert isinstance(answer, Client)
    else:
        assert refusal(answer)["status"] == 401
        assert refusal(answer)["code"] == "expired_api_key"


def test_no_refusal_repeats_the_secret() -> None:
    for headers in (bearer("ck_secret"), [(b"x-api-key", b"ck_secret")]):
        answer = authenticate(fleet(key("ck_one")), headers, noon)
        assert isinstance(answer, Response)
        assert b"ck_secret" not in answer.body


@given(st.binary(max_size=80))
def test_no_other_secret_opens(secret: bytes) -> None:
    one = fleet(key("ck_one"), {"id": "broken", "secret_hash": "", "role": "admin"})
    assert (one.find_client(secret) is not None) == (secret == b"ck_one")


@pytest.mark.parametrize("text", ["", "zz" * 32, "ab", "ab" * 33, hashed("ck_one")[:-1], hashed("ck_one") + "00"])
def test_a_hash_that_is_none_opens_nothing(text: str) -> None:
    assert not fleet({"id": "a", "secret_hash": text, "role": "admin"}).clients


def listed(client: Client | None) -> list[str]:
    assert client is not None
    answer = json.loads(client.model_list)
    assert answer["object"] == "list"
    return [model["id"] for model in answer["data"]]


def test_each_key_lists_its_own_models() -> None:
    keys = (key("all"), key("some", models=["large", "gone"]), key("none", models=[]))
    one = fleet(*keys)
    assert listed(one.find_client(b"all")) == ["small", "large"]
    assert listed(one.find_client(b"some")) == ["large"]
    assert listed(one.find_client(b"none")) == []
    some = one.find_client(b"some")
    assert some is not None
    assert some.may_use("large")
    assert not some.may_use("small")


def test_a_model_has_the_shape_clients_expect() -> None:
    assert json.loads(fleet().models["small"]) == {
        "id": "small",
        "object": "model",
        "created": 5,
        "owned_by": "corral",
    }
