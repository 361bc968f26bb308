"""Bus credentials as the bus asks for them: the controller is asked, but not at every try."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import pytest

from corral.contract.messages.nodes import BusAccess, NodeRegistered
from corral.kit.errors import Unavailable
from corral.worker.agent.controller import ControllerUnreachable, ErrorResponse
from corral.worker.agent.join.bus_access import NodeCredentials, credentials_in
from corral.worker.agent.join.responses import Deleted, RegisterAgain
from tests.support.manual_clock import ManualClock


def registered(jwt: str = "jwt-0", life_s: float = 3600.0) -> NodeRegistered:
    return NodeRegistered(id="n", protocol=1, nats_jwt=jwt, nats_user_seed="seed", expires_in_s=life_s)


class Desk:
    """A controller's credentials desk: hands out jwt-1, jwt-2, …, or raises what it is told to."""

    def __init__(self, life_s: float = 3600.0) -> None:
        self.asked = 0
        self.trouble: Callable[[], Exception] | None = None
        self._life_s = life_s

    async def renew(self) -> NodeRegistered:
        self.asked += 1
        if self.trouble is not None:
            raise self.trouble()
        return registered(f"jwt-{self.asked}", self._life_s)


def source(desk: Desk, clock: ManualClock, lost: list[object], life_s: float = 3600.0) -> NodeCredentials:
    return NodeCredentials(registered(life_s=life_s), renew=desk.renew, on_lost=lost.append, clock=clock)


async def test_those_of_the_registration_come_first() -> None:
    desk, clock = Desk(), ManualClock()
    given = await source(desk, clock, []).current()
    assert (given.jwt, given.seed, given.expires_in_s) == ("jwt-0", "seed", 3600.0)
    assert desk.asked == 0


async def test_young_ones_are_given_again_with_what_is_left() -> None:
    desk, clock = Desk(), ManualClock()
    credentials = source(desk, clock, [])
    clock.advance(20)
    given = await credentials.current()
    assert (given.jwt, given.expires_in_s) == ("jwt-0", 3580.0)
    assert desk.asked == 0


async def test_older_ones_are_renewed() -> None:
    desk, clock = Desk(), ManualClock()
    credentials = source(desk, clock, [])
    clock.advance(31)
    assert (await credentials.current()).jwt == "jwt-1"
    assert (await credentials.current()).jwt == "jwt-1"
    assert desk.asked == 1


async def test_short_lives_are_renewed_in_time() -> None:
    desk, clock = Desk(life_s=3), ManualClock()
    credentials = source(desk, clock, [], life_s=3)
    for round_ in range(1, 6):
        clock.advance(2.25)  # three quarters, when the bus asks
        assert (await credentials.current()).jwt == f"jwt-{round_}"


@pytest.mark.parametrize("trouble", [lambda: ControllerUnreachable("away"), lambda: ErrorResponse(503, "later")])
async def test_without_the_controller_the_old_ones_serve_until_they_end(trouble: Callable[[], Exception]) -> None:
    desk, clock, lost = Desk(), ManualClock(), list[object]()
    credentials = source(desk, clock, lost)
    desk.trouble = trouble
    clock.advance(3000)
    given = await credentials.current()
    assert (given.jwt, given.expires_in_s) == ("jwt-0", 600.0)
    clock.advance(601)
    with pytest.raises(Unavailable):
        await credentials.current()
    desk.trouble = None
    assert (await credentials.current()).jwt == "jwt-3"
    assert lost == []


@pytest.mark.parametrize(("status", "kind"), [(404, RegisterAgain), (401, RegisterAgain), (410, Deleted)])
async def test_a_controller_that_does_not_know_the_node_ends_the_session(status: int, kind: type) -> None:
    desk, clock, lost = Desk(), ManualClock(), list[object]()
    credentials = source(desk, clock, lost)
    desk.trouble = lambda: ErrorResponse(status, "who?")
    clock.advance(31)
    with pytest.raises(Unavailable):
        await credentials.current()
    assert [type(meaning) for meaning in lost] == [kind]


def _jwt(claims: dict[str, object]) -> str:
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({}, claims)]
    return ".".join([*parts, "c2ln"])


@pytest.mark.parametrize(
    ("reply", "life_s"),
    [
        (NodeRegistered(protocol=1, nats_jwt="j", nats_user_seed="s", expires_in_s=60.0), 60.0),
        (NodeRegistered(nats_jwt=_jwt({"exp": 1100}), nats_user_seed="s"), 100.0),  # LocalAI says it in the token only
        (NodeRegistered(nats_jwt=_jwt({"exp": 900}), nats_user_seed="s"), 1.0),
        (NodeRegistered(nats_jwt=_jwt({}), nats_user_seed="s"), None),
        (NodeRegistered(nats_jwt="no jwt", nats_user_seed="s"), None),
    ],
)
def test_how_long_they_live(reply: NodeRegistered, life_s: float | None) -> None:
    found = credentials_in(reply, now=1000.0)
    assert found is not None
    assert found.expires_in_s == life_s


def test_shared_credentials_and_none() -> None:
    shared = credentials_in(NodeRegistered(protocol=1, bus=BusAccess(user="u", password="p")), now=0)
    assert shared is not None
    assert (shared.user, shared.password) == ("u", "p")
    assert credentials_in(NodeRegistered(protocol=1), now=0) is None  # ours never means an open bus
    assert credentials_in(NodeRegistered(), now=0) is not None
