"""Signed tokens at the ingress: who comes in, by whose clock, and what is remembered."""

from __future__ import annotations

import json

import pytest

from corral.contract.access import Scope
from corral.kit.signing import Signer
from corral.worker.agent.server_clock import ServerClock
from corral.worker.ingress.tokens import TokenRejected, TokenVerifier
from tests.support.manual_clock import ManualClock

NODE = "11111111-2222-3333-4444-555555555555"
START = 1_800_000_000.0
SIGNER = Signer(Signer.new_private_key())


def token(*, aud: str = NODE, scope: list[str] | None = None, life_s: float = 600, now: float = START) -> bytes:
    claims = {"sub": "controller", "aud": aud, "scope": scope or ["probe"], "exp": int(now + life_s)}
    return b"Bearer " + SIGNER.sign(json.dumps(claims).encode()).encode()


def check_with(clock: ManualClock, **options: int) -> TokenVerifier:
    tokens = TokenVerifier(ServerClock(clock).now, **options)
    tokens.trust(SIGNER.public_key, NODE)
    return tokens


def status_of(found: TokenRejected | None) -> int:
    return 200 if found is None else found.status


@pytest.mark.parametrize(
    ("authorization", "scope", "status"),
    [
        (token(), Scope.PROBE, 200),
        (token(aud="*"), Scope.PROBE, 200),
        (token(scope=["replicas", "logs"]), Scope.LOGS, 200),
        (token(scope=["replicas"]), None, 200),
        (token(scope=["replicas"]), Scope.PROBE, 403),
        (token(scope=["unheard-of"]), None, 403),
        (token(aud="another"), Scope.PROBE, 403),
        (token(life_s=-1), Scope.PROBE, 401),
        (token(life_s=0), Scope.PROBE, 401),
        (token(life_s=10 * 365 * 86400), Scope.PROBE, 401),
        (None, Scope.PROBE, 401),
        (b"", Scope.PROBE, 401),
        (b"Bearer", Scope.PROBE, 401),
        (b"Bearer x", Scope.PROBE, 401),
        (b"Bearer " + b"x" * 5000, Scope.PROBE, 401),
        (b"Bearer \xff\xfe.\xff", Scope.PROBE, 401),
        (b"Basic " + token()[7:], Scope.PROBE, 401),
        (token()[:-4], Scope.PROBE, 401),
    ],
)
def test_who_comes_in(authorization: bytes | None, scope: Scope | None, status: int) -> None:
    assert status_of(check_with(ManualClock(START)).check(authorization, scope)) == status


def test_nobody_before_the_cluster_is_known() -> None:
    tokens = TokenVerifier(ServerClock(ManualClock(START)).now)
    assert status_of(tokens.check(token(), Scope.PROBE)) == 503


def test_somebody_elses_signature() -> None:
    tokens = TokenVerifier(ServerClock(ManualClock(START)).now)
    tokens.trust(Signer(Signer.new_private_key()).public_key, NODE)
    assert status_of(tokens.check(token(), Scope.PROBE)) == 401


def test_a_signed_text_that_is_no_claims() -> None:
    tokens = check_with(ManualClock(START))
    assert status_of(tokens.check(b"Bearer " + SIGNER.sign(b"[1]").encode(), Scope.PROBE)) == 401


def test_a_remembered_token_still_expires() -> None:
    clock = ManualClock(START)
    tokens, shown = check_with(clock), token(life_s=60)
    assert status_of(tokens.check(shown, Scope.PROBE)) == 200
    clock.advance(59)
    assert status_of(tokens.check(shown, Scope.PROBE)) == 200
    clock.advance(2)
    assert status_of(tokens.check(shown, Scope.PROBE)) == 401


def test_a_remembered_token_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, shown = check_with(ManualClock(START)), token()
    assert tokens.check(shown, Scope.PROBE) is None

    def never(*_: object) -> bytes:
        raise AssertionError("verified twice")

    monkeypatch.setattr("corral.kit.signing.Verifier.verify", never)
    assert tokens.check(shown, Scope.PROBE) is None


def test_another_key_forgets_what_the_old_one_vouched_for() -> None:
    tokens, shown = check_with(ManualClock(START)), token()
    assert tokens.check(shown, Scope.PROBE) is None
    tokens.trust(Signer(Signer.new_private_key()).public_key, NODE)
    assert status_of(tokens.check(shown, Scope.PROBE)) == 401


def test_an_unusable_key_changes_nothing() -> None:
    tokens = check_with(ManualClock(START))
    tokens.trust("not a key", NODE)
    tokens.trust("", NODE)
    assert tokens.check(token(), Scope.PROBE) is None


def test_what_is_remembered_is_bounded() -> None:
    tokens = check_with(ManualClock(START), max_cached=8)
    for life_s in range(60, 160):
        assert tokens.check(token(life_s=life_s), Scope.PROBE) is None
    assert len(tokens._verified) <= 8


@pytest.mark.parametrize("skew_s", [-7200.0, -300.0, 300.0, 7200.0])
def test_the_controllers_clock_decides(skew_s: float) -> None:
    clock = ManualClock(START + skew_s)  # this machine is wrong by so much
    server = ServerClock(clock)
    tokens = TokenVerifier(server.now)
    tokens.trust(SIGNER.public_key, NODE)
    server.learn(START)
    assert status_of(tokens.check(token(life_s=60), Scope.PROBE)) == 200
    assert status_of(tokens.check(token(life_s=-60), Scope.PROBE)) == 401
    assert server.skew_s == pytest.approx(-skew_s)


def test_setting_the_wall_clock_changes_nothing() -> None:
    clock = ManualClock(START)
    server = ServerClock(clock)
    server.learn(START)
    clock.step_wall(86400)
    assert server.now() == START
    clock.advance(5)
    assert server.now() == START + 5


def test_a_peer_that_tells_no_time_teaches_nothing() -> None:
    server = ServerClock(ManualClock(START))
    server.learn(0.0)
    assert server.now() == START
