"""NATS tokens: the claims are pinned, since the server and other people's tools read them."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import nkeys
import pytest

from corral.bus.auth import (
    BusKeys,
    account_jwt,
    gateway_user_key,
    inbox_of,
    mint_gateway_credentials,
    mint_node_credentials,
    mint_service_credentials,
    mint_system_credentials,
    node_user_key,
    revise_account_jwt,
)
from corral.bus.jwt import BadKey, KeyKind, check_seed, decode_claims, derive_seed, encode_token, new_seed, public_key

NOON = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)
NOON_UNIX = 1794744000


class Countdown:
    """Random bytes that are not."""

    def __init__(self) -> None:
        self.left = 255

    def __call__(self, count: int) -> bytes:
        self.left -= 1
        return bytes([self.left]) * count


@pytest.fixture
def keys() -> BusKeys:
    return BusKeys.generate(Countdown(), NOON)


def claims_of(token: str, issuer: str) -> dict[str, Any]:
    """The claims, after checking everything about the envelope."""
    header, body, signature = token.split(".")

    def raw(part: str) -> bytes:
        return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))

    assert json.loads(raw(header)) == {"typ": "JWT", "alg": "ed25519-nkey"}
    claims: dict[str, Any] = json.loads(raw(body))
    assert claims["iss"] == issuer
    verify(issuer, f"{header}.{body}".encode(), raw(signature))
    without_id = json.dumps({**claims, "jti": ""}, separators=(",", ":"), sort_keys=True).encode()
    expected = base64.b32encode(hashlib.new("sha512_256", without_id).digest()).decode().rstrip("=")
    assert claims.pop("jti") == expected
    del claims["iss"]
    return claims


def verify(key: str, data: bytes, signature: bytes) -> None:
    from nacl.signing import VerifyKey

    VerifyKey(base64.b32decode(key)[1:33]).verify(data, signature)


def test_keys_are_of_their_kind(keys: BusKeys) -> None:
    assert [seed[:2] for seed in (keys.operator_seed, keys.account_seed, keys.system_account_seed)] == [
        "SO",
        "SA",
        "SA",
    ]
    assert [seed[:2] for seed in (keys.system_user_seed, keys.service_user_seed)] == ["SU", "SU"]
    assert keys.account[0] == keys.system_account[0] == "A"
    assert len({keys.account_seed, keys.system_account_seed}) == 2
    assert public_key(keys.account_seed) == nkeys.from_seed(keys.account_seed.encode()).public_key.decode()


def test_keys_are_not_shown(keys: BusKeys) -> None:
    minted = mint_node_credentials(keys.account_seed, "n", now=NOON, ttl_s=1, reply_ttl_s=1)
    shown = repr(keys) + repr(minted) + repr(minted.credentials())
    assert minted.seed not in shown
    assert minted.jwt not in shown
    assert keys.operator_seed not in shown


def test_operator(keys: BusKeys) -> None:
    operator = public_key(keys.operator_seed)
    assert claims_of(keys.operator_jwt, operator) == {
        "sub": operator,
        "name": "corral",
        "iat": NOON_UNIX,
        "nats": {"type": "operator", "version": 2, "system_account": keys.system_account},
    }


def test_account(keys: BusKeys) -> None:
    token = account_jwt(keys.operator_seed, keys.account, name="corral", now=NOON)
    assert claims_of(token, public_key(keys.operator_seed)) == {
        "sub": keys.account,
        "name": "corral",
        "iat": NOON_UNIX,
        "nats": {
            "type": "account",
            "version": 2,
            "limits": {
                "conn": -1,
                "data": -1,
                "payload": -1,
                "subs": -1,
                "imports": 0,
                "exports": 0,
                "leaf": 0,
                "wildcards": True,
                "disallow_bearer": True,
            },
        },
    }


def test_account_with_revocations(keys: BusKeys) -> None:
    user = node_user_key(keys.account_seed, "n1")
    token = account_jwt(keys.operator_seed, keys.account, name="corral", now=NOON, revocations={user: NOON_UNIX})
    assert claims_of(token, public_key(keys.operator_seed))["nats"]["revocations"] == {user: NOON_UNIX}


def test_revising_an_account_keeps_what_its_owner_said(keys: BusKeys) -> None:
    first = account_jwt(keys.operator_seed, keys.account, name="theirs", now=NOON, revocations={"UOLD": 1})
    later = datetime(2026, 11, 15, 13, 0, 0, tzinfo=UTC)
    revised = revise_account_jwt(first, keys.operator_seed, now=later, revocations={"UNEW": 2})
    before, after = (claims_of(token, public_key(keys.operator_seed)) for token in (first, revised))
    assert after["nats"]["revocations"] == {"UNEW": 2}
    assert after["nats"]["limits"] == before["nats"]["limits"]
    assert (after["name"], after["sub"], after["iat"]) == ("theirs", keys.account, NOON_UNIX + 3600)


def test_node(keys: BusKeys) -> None:
    node = "0f9e1c1e-8c44-4a39-9a0c-0b5b6e6f3a11"
    minted = mint_node_credentials(keys.account_seed, node, now=NOON, ttl_s=3600, reply_ttl_s=1200)
    assert minted.inbox == f"_INBOX_{node}"
    assert minted.expires_in_s == 3600
    assert minted.public_key == public_key(minted.seed) == node_user_key(keys.account_seed, node)
    assert claims_of(minted.jwt, keys.account) == {
        "sub": minted.public_key,
        "name": f"corral-node-{node}",
        "iat": NOON_UNIX,
        "exp": NOON_UNIX + 3600,
        "nats": {
            "type": "user",
            "version": 2,
            "pub": {
                "allow": [
                    f"nodes.{node}.heartbeat",
                    f"nodes.{node}.load",
                    f"nodes.{node}.backend.*.*.progress",
                    f"nodes.{node}.backend.*.*.result",
                    f"nodes.{node}.replica.*.*.progress",
                    f"nodes.{node}.replica.*.*.result",
                    f"nodes.{node}.model.*.*.progress",
                    f"nodes.{node}.model.*.*.result",
                ]
            },
            "sub": {
                "allow": [f"nodes.{node}.>", f"_INBOX_{node}.>"],
                "deny": [
                    f"nodes.{node}.heartbeat",
                    f"nodes.{node}.load",
                    f"nodes.{node}.backend.*.*.progress",
                    f"nodes.{node}.backend.*.*.result",
                    f"nodes.{node}.replica.*.*.progress",
                    f"nodes.{node}.replica.*.*.result",
                    f"nodes.{node}.model.*.*.progress",
                    f"nodes.{node}.model.*.*.result",
                ],
            },
            "resp": {"max": 1, "ttl": 1_200_000_000_000},
            "subs": -1,
            "data": -1,
            "payload": -1,
            "allowed_connection_types": ["STANDARD"],
        },
    }


def test_localai_node(keys: BusKeys) -> None:
    minted = mint_node_credentials(keys.account_seed, "w1", now=NOON, ttl_s=60, reply_ttl_s=1200, localai=True)
    nats = claims_of(minted.jwt, keys.account)["nats"]
    assert nats["pub"] == {"allow": ["nodes.w1.backend.install.*.progress"]}
    assert nats["sub"] == {"allow": ["nodes.w1.>"], "deny": ["nodes.w1.backend.install.*.progress"]}
    assert nats["resp"] == {"max": 1, "ttl": 1_200_000_000_000}
    assert minted.inbox == ""


def test_a_node_id_cannot_widen_its_own_permissions(keys: BusKeys) -> None:
    minted = mint_node_credentials(keys.account_seed, "a.> *", now=NOON, ttl_s=60, reply_ttl_s=60)
    nats = claims_of(minted.jwt, keys.account)["nats"]
    assert nats["sub"]["allow"] == ["nodes.a----.>", "_INBOX_a----.>"]


def test_gateway(keys: BusKeys) -> None:
    minted = mint_gateway_credentials(keys.account_seed, "g1", now=NOON, ttl_s=60)
    nats = claims_of(minted.jwt, keys.account)["nats"]
    assert nats["pub"] == {"deny": [">"]}
    assert nats["sub"] == {"allow": ["corral.view.>", "nodes.*.load", "_INBOX_gateway-g1.>"]}
    assert "resp" not in nats
    assert minted.inbox == "_INBOX_gateway-g1"
    assert minted.public_key == gateway_user_key(keys.account_seed, "g1")


def test_service(keys: BusKeys) -> None:
    seeds = keys.account_seed, keys.service_user_seed
    minted = mint_service_credentials(*seeds, now=NOON, ttl_s=None, reply_ttl_s=60)
    claims = claims_of(minted.jwt, keys.account)
    assert "exp" not in claims
    assert claims["name"] == "corral-service"
    assert claims["nats"]["pub"] == {"allow": ["nodes.>", "corral.>"]}
    assert claims["nats"]["sub"] == {"allow": ["nodes.>", "corral.>", "_INBOX_service.>"]}
    assert minted.expires_in_s is None


def test_system(keys: BusKeys) -> None:
    minted = mint_system_credentials(keys, now=NOON, ttl_s=60)
    nats = claims_of(minted.jwt, keys.system_account)["nats"]
    assert nats["pub"] == {"allow": ["$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.ACCOUNT.*.CLAIMS.LOOKUP"]}
    assert nats["sub"] == {"allow": ["_INBOX_system.>"]}


def test_a_lifetime_is_never_promised_longer_than_the_server_grants(keys: BusKeys) -> None:
    """The server counts whole seconds from the start of this one."""
    late = datetime(2026, 11, 15, 12, 0, 0, 900_000, tzinfo=UTC)
    minted = mint_node_credentials(keys.account_seed, "n", now=late, ttl_s=3, reply_ttl_s=60)
    assert decode_claims(minted.jwt)["exp"] == NOON_UNIX + 3
    assert minted.expires_in_s == pytest.approx(2.1)


def test_the_same_name_has_the_same_key_and_others_have_others(keys: BusKeys) -> None:
    """So what to revoke follows from the node's id, whichever controller minted and however often."""
    other = BusKeys.generate(lambda count: b"\x07" * count, NOON)
    assert node_user_key(keys.account_seed, "n") == node_user_key(keys.account_seed, "n")
    different = {
        node_user_key(keys.account_seed, "n"),
        node_user_key(keys.account_seed, "m"),
        gateway_user_key(keys.account_seed, "n"),
        node_user_key(other.account_seed, "n"),
    }
    assert len(different) == 4


@pytest.mark.parametrize("seed", ["", "SU", "nonsense", "SUAAAA", "x" * 58, "SÄ"])
def test_what_is_no_seed_is_refused_without_repeating_it(seed: str) -> None:
    with pytest.raises(BadKey) as refused:
        public_key(seed)
    assert not seed or seed not in str(refused.value).split()


def test_a_seed_of_another_kind_is_refused(keys: BusKeys) -> None:
    check_seed(keys.account_seed, KeyKind.ACCOUNT)
    with pytest.raises(BadKey, match="not an account seed"):
        check_seed(keys.service_user_seed, KeyKind.ACCOUNT)


@pytest.mark.parametrize("token", ["", "a.b", "a.b.c", "a.W10.c", "..", "a.!!!.c"])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(BadKey):
        decode_claims(token)


def test_the_inbox_of_a_token_is_the_one_it_may_hear(keys: BusKeys) -> None:
    service = mint_service_credentials(
        keys.account_seed, keys.service_user_seed, now=NOON, ttl_s=None, reply_ttl_s=60, name="attic"
    )
    assert inbox_of(service.jwt) == service.inbox == "_INBOX_attic"
    usual = {"type": "user", "sub": {"allow": ["nodes.>", "_INBOX.>"]}}
    for nats in (usual, {"type": "user"}, {"type": "user", "sub": {"deny": ["x"]}}):
        token = encode_token({"sub": public_key(keys.service_user_seed), "nats": nats}, keys.account_seed)
        assert inbox_of(token) == "_INBOX"
    for wrong in (keys.operator_jwt, "nonsense"):
        with pytest.raises(BadKey):
            inbox_of(wrong)


def test_seeds_are_random_bytes_in_an_envelope() -> None:
    seed = new_seed(KeyKind.USER, lambda count: bytes(range(count)))
    assert nkeys.decode_seed(seed.encode())[1] == bytes(range(32))
    assert derive_seed(seed, "node", "a") != derive_seed(seed, "nodea")
