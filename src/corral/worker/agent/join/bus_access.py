"""How a node reaches the bus: address, TLS and credentials (docs/reference/wire/subjects.md#authentication).

The controller says all of it, unless a person gave settings. The bus asks for credentials at every connect and when
three quarters of their lifetime have passed. Credentials are given again only while they are young, or while the
controller cannot be reached: the bus may be asking because the server refused them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from corral.bus.api import BusCredentials, BusTls, CredentialSource, FixedCredentials
from corral.bus.jwt import decode_claims
from corral.bus.nats import NatsBus
from corral.bus.permissions import INBOX
from corral.contract.messages.nodes import NodeRegistered
from corral.kit.clock import Clock
from corral.kit.errors import Unavailable
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.worker.agent.controller import ControllerUnreachable, ErrorResponse
from corral.worker.agent.join.responses import Deleted, RegisterAgain, TryLater, read_call
from corral.worker.settings.network import BusSettings
from corral.worker.status import FatalError

log = get_log(__name__)
CA_FILE = "bus-ca.crt"
YOUNG_S = 30.0  # while the bus is down, a fleet must not fetch new credentials at every attempt to connect
YOUNG_SHARE = 0.25


class BusOpener:
    """Makes the bus of one session."""

    def __init__(self, settings: BusSettings, folder: Path, clock: Clock) -> None:
        """`folder` is the worker's data folder."""
        self._settings = settings
        self._folder = folder
        self._clock = clock

    def __call__(self, reply: NodeRegistered, source: CredentialSource) -> NatsBus:
        settings, said = self._settings, reply.bus
        urls = settings.bus_urls or (said.urls if said is not None else ())
        if not urls:
            raise FatalError("the controller does not say where its bus is: give --bus-urls (or LOCALAI_NATS_URL)")
        if settings.bus_jwt:  # a person's fixed credential is used as it is and never renewed, as the contract says
            source = FixedCredentials(BusCredentials(jwt=settings.bus_jwt, seed=settings.bus_user_seed))
        return NatsBus(
            urls,
            source,
            tls=self._tls(urls, said.ca if said is not None else ""),
            inbox_prefix=(said.inbox if said is not None else "") or INBOX,
            name=f"corral-worker-{reply.name or reply.id}",
            clock=self._clock,
        )

    def _tls(self, urls: tuple[str, ...], ca_pem: str) -> BusTls | None:
        settings = self._settings
        ca = settings.bus_ca or self._store_ca(ca_pem)
        if ca is None and settings.bus_cert is None and not any(url.startswith("tls://") for url in urls):
            return None
        return BusTls(ca=ca, certificate=settings.bus_cert, key=settings.bus_key)

    def _store_ca(self, ca_pem: str) -> Path | None:
        """The client library reads it from a file."""
        if not ca_pem:
            return None
        path = self._folder / CA_FILE
        try:
            write_atomically(path, ca_pem.encode(), mode=0o600)
        except OSError as error:
            raise FatalError(
                f"cannot write {path}: {error.strerror}; free disk space or fix its permissions"
            ) from error
        return path


@dataclass(frozen=True)
class HeldCredentials:
    credentials: BusCredentials
    since: float  # monotonic

    def age_s(self, now: float) -> float:
        return now - self.since

    def left_s(self, now: float) -> float | None:
        """None: they do not expire."""
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
        on_lost: Callable[[RegisterAgain | Deleted], None],
        clock: Clock,
    ) -> None:
        """`renew` fetches new credentials; `on_lost` is called when the controller does not know the node any more."""
        self._renew = renew
        self._on_lost = on_lost
        self._clock = clock
        self._held: HeldCredentials | None = self._hold(reply)

    async def current(self) -> BusCredentials:
        now = self._clock.monotonic()
        if self._held is not None and self._held.is_young(now):
            return _shortened(self._held, now)
        try:
            renewed = self._hold(await self._renew())
        except ControllerUnreachable as away:
            return self._use_old(away.message)
        except ErrorResponse as answer:
            meaning = read_call(answer.status, answer.message)
            if isinstance(meaning, TryLater):
                return self._use_old(meaning.why)
            self._on_lost(meaning)
            raise Unavailable(f"the controller gives no bus credentials: {meaning.why}") from answer
        if renewed is None:
            return self._use_old("the response has none")
        self._held = renewed
        log.debug("bus credentials renewed", expires_in_s=renewed.credentials.expires_in_s)
        return renewed.credentials

    def _use_old(self, why: str) -> BusCredentials:
        now = self._clock.monotonic()
        if self._held is not None and (left_s := self._held.left_s(now)) is not None and left_s <= 0:
            self._held = None
        if self._held is None:
            raise Unavailable(f"no bus credentials: {why}")
        log.warning("bus credentials not renewed, using the old ones", reason=why)
        return _shortened(self._held, now)

    def _hold(self, reply: NodeRegistered) -> HeldCredentials | None:
        credentials = credentials_in(reply, now=self._clock.now().timestamp())
        return None if credentials is None else HeldCredentials(credentials, self._clock.monotonic())


def credentials_in(reply: NodeRegistered, *, now: float) -> BusCredentials | None:
    """The credentials in a reply. A LocalAI controller (no `protocol`) that gives none has an open bus."""
    if reply.nats_jwt:
        return BusCredentials(
            jwt=reply.nats_jwt,
            seed=reply.nats_user_seed,
            expires_in_s=reply.expires_in_s or _lifetime_of(reply.nats_jwt, now),
        )
    if reply.bus is not None and reply.bus.user:
        return BusCredentials(user=reply.bus.user, password=reply.bus.password)
    return None if reply.protocol else BusCredentials()


def _lifetime_of(jwt: str, now: float) -> float | None:
    """LocalAI does not report the lifetime; the JWT has an expiry time."""
    try:
        expires_at = decode_claims(jwt).get("exp")
    except ValueError:
        return None
    return max(1.0, float(expires_at) - now) if isinstance(expires_at, int | float) else None


def _shortened(held: HeldCredentials, now: float) -> BusCredentials:
    return replace(held.credentials, expires_in_s=held.left_s(now))
