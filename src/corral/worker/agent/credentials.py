"""The bus credentials of a node, as the bus asks for them (docs/reference/wire/subjects.md#authentication).

The bus asks at every connect and when three quarters of a lifetime are over. What is at hand is given again only while
it is young, or while the controller cannot be asked: the bus may be asking because it was refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from corral.bus.api import BusCredentials
from corral.bus.jwt import decode_claims
from corral.contract.messages.nodes import NodeRegistered
from corral.kit.clock import Clock
from corral.kit.errors import Unavailable
from corral.kit.log import get_log
from corral.worker.agent.answers import Deleted, RegisterAgain, TryLater, read_call
from corral.worker.agent.controller import Answered, ControllerAway

log = get_log(__name__)
YOUNG_S = 30.0  # a fleet whose bus is away for an hour must not ask the controller for new ones at every try
YOUNG_SHARE = 0.25


@dataclass(frozen=True)
class Held:
    credentials: BusCredentials
    since: float  # monotonic

    def age_s(self, now: float) -> float:
        return now - self.since

    def left_s(self, now: float) -> float | None:
        """None = for ever."""
        whole = self.credentials.expires_in_s
        return None if whole is None else whole - self.age_s(now)

    def is_young(self, now: float) -> bool:
        whole = self.credentials.expires_in_s
        return self.age_s(now) < (YOUNG_S if whole is None else min(YOUNG_S, YOUNG_SHARE * whole))


class NodeCredentials:
    """A `CredentialSource` of the bus."""

    def __init__(
        self,
        reply: NodeRegistered,
        *,
        renew: Callable[[], Awaitable[NodeRegistered]],
        lost: Callable[[RegisterAgain | Deleted], None],
        clock: Clock,
    ) -> None:
        """`renew` asks the controller; `lost` is told when the controller does not know the node any more."""
        self._renew = renew
        self._lost = lost
        self._clock = clock
        self._held: Held | None = self._hold(reply)

    async def current(self) -> BusCredentials:
        now = self._clock.monotonic()
        if self._held is not None and self._held.is_young(now):
            return _shortened(self._held, now)
        try:
            renewed = self._hold(await self._renew())
        except ControllerAway as away:
            return self._old_ones(away.message)
        except Answered as answer:
            meaning = read_call(answer.status, answer.message)
            if isinstance(meaning, TryLater):
                return self._old_ones(meaning.why)
            self._lost(meaning)
            raise Unavailable(f"the controller gives no bus credentials: {meaning.why}") from answer
        if renewed is None:
            return self._old_ones("its answer carries none")
        self._held = renewed
        log.debug("bus credentials renewed", expires_in_s=renewed.credentials.expires_in_s)
        return renewed.credentials

    def _old_ones(self, why: str) -> BusCredentials:
        now = self._clock.monotonic()
        if self._held is not None and (left_s := self._held.left_s(now)) is not None and left_s <= 0:
            self._held = None
        if self._held is None:
            raise Unavailable(f"no bus credentials: {why}")
        log.warning("bus credentials not renewed, using the old ones", reason=why)
        return _shortened(self._held, now)

    def _hold(self, reply: NodeRegistered) -> Held | None:
        credentials = credentials_in(reply, now=self._clock.now().timestamp())
        return None if credentials is None else Held(credentials, self._clock.monotonic())


def credentials_in(reply: NodeRegistered, *, now: float) -> BusCredentials | None:
    """What a reply offers. Without `protocol` it is LocalAI's: no credential there means an open bus."""
    if reply.nats_jwt:
        return BusCredentials(
            jwt=reply.nats_jwt,
            seed=reply.nats_user_seed,
            expires_in_s=reply.expires_in_s or _life_of(reply.nats_jwt, now),
        )
    if reply.bus is not None and reply.bus.user:
        return BusCredentials(user=reply.bus.user, password=reply.bus.password)
    return None if reply.protocol else BusCredentials()


def _life_of(jwt: str, now: float) -> float | None:
    """LocalAI does not say how long; the token does, on its own clock."""
    try:
        expires_at = decode_claims(jwt).get("exp")
    except ValueError:
        return None
    return max(1.0, float(expires_at) - now) if isinstance(expires_at, int | float) else None


def _shortened(held: Held, now: float) -> BusCredentials:
    return replace(held.credentials, expires_in_s=held.left_s(now))
