"""Where the bus is and how it is reached: what the controller said, unless a person said otherwise."""

from __future__ import annotations

from pathlib import Path

from corral.bus.api import BusCredentials, BusTls, CredentialSource, FixedCredentials
from corral.bus.nats import NatsBus
from corral.bus.permissions import INBOX
from corral.contract.messages.nodes import NodeRegistered
from corral.kit.clock import Clock
from corral.kit.files import write_atomically
from corral.worker.agent.stop import CannotGoOn
from corral.worker.settings import WorkerSettings

CA_FILE = "bus-ca.crt"


class BusOpener:
    """Makes the bus of one session."""

    def __init__(self, settings: WorkerSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock

    def __call__(self, reply: NodeRegistered, source: CredentialSource) -> NatsBus:
        settings, said = self._settings, reply.bus
        urls = settings.bus_urls or (said.urls if said is not None else ())
        if not urls:
            raise CannotGoOn("the controller does not say where its bus is: give --bus-urls (or LOCALAI_NATS_URL)")
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
        path = self._settings.data / CA_FILE
        try:
            write_atomically(path, ca_pem.encode(), mode=0o600)
        except OSError as error:
            raise CannotGoOn(f"cannot write {path}: {error.strerror}; make room or mend its permissions") from error
        return path
