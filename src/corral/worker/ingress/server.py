"""The listening side of the ingress: one port, plain until the cluster grants a certificate, TLS from then on.

The relay does the serving and `door.py` the routing; here is the port's life, and what a registration changes about it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from types import TracebackType

from corral.contract.messages.nodes import IngressOffer, NodeRegistered
from corral.kit.log import get_log
from corral.relay import Limits, RelayServer, UpstreamPool
from corral.worker.addresses import HostPort
from corral.worker.agent.certificate import IngressCertificate
from corral.worker.agent.stop import CannotGoOn
from corral.worker.agent.waiting import unless_set
from corral.worker.ingress.door import Door
from corral.worker.ingress.tokens import TokenCheck

log = get_log(__name__)
CLOSE_GRACE_S = 2.0  # whoever is still being answered when the worker has already said goodbye


class Ingress:
    """`async with`: listening when entered, so a port that is taken ends the worker before it joins anything."""

    def __init__(
        self,
        where: HostPort,
        door: Door,
        tokens: TokenCheck,
        certificate: IngressCertificate,
        now: Callable[[], float],
        *,
        shared_token: str = "",
        inherited: Sequence[socket.socket] = (),
        limits: Limits | None = None,
    ) -> None:
        """`shared_token`: what a LocalAI controller shows, should this turn out to be one's worker.
        `inherited`: sockets that listen already, of the worker this one takes over from."""
        self._where = where
        self._door = door
        self._tokens = tokens
        self._certificate = certificate
        self._now = now
        self._shared_token = shared_token
        self._inherited = list(inherited)
        self._limits = limits
        self._pool: UpstreamPool | None = None
        self._server: RelayServer | None = None
        self._secure = False
        self.port = where.port or 0

    async def __aenter__(self) -> Ingress:
        self._pool = UpstreamPool()
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            cut = await self._server.drain(CLOSE_GRACE_S)
            log.info("ingress closed", cut=cut)
        await self._door.close()
        if self._pool is not None:
            await self._pool.close()

    @property
    def in_flight(self) -> int:
        """Requests to backends. Whoever follows a log does not keep a worker from leaving."""
        return self._door.inflight.total

    async def wait_idle(self) -> None:
        """Until each backend had a moment without requests."""
        await self._door.inflight.wait_all_idle()

    def offer(self, advertise: str) -> IngressOffer:
        """What a registration says about this port."""
        return IngressOffer(port=self.port, advertise=advertise, csr=self._certificate.csr, tls=self._secure)

    def csr_if_due(self) -> str:
        return self._certificate.csr_if_due(self._now())

    async def welcome(self, reply: NodeRegistered) -> None:
        """The node has joined: believe its cluster's tokens, and serve as its cluster wants."""
        self._tokens.trust(reply.signing_key, reply.id)
        self._tokens.share(self._shared_token if reply.protocol == 0 else "")
        if reply.ingress is not None and reply.ingress.certificate:
            await self.take_certificate(reply)
        else:  # a signing request went with the registration, so this cluster has no CA
            self._certificate.drop()
        if self._secure != (self._certificate.context is not None):
            await self._relisten()

    async def take_certificate(self, reply: NodeRegistered) -> None:
        if reply.ingress is not None and reply.ingress.certificate:
            await asyncio.to_thread(self._certificate.accept, reply.ingress.certificate)

    async def _relisten(self) -> None:
        """From plain to TLS or back: once, when a node joins. Probes' connections break, nobody else has come yet."""
        if self._server is not None:
            await self._server.drain(CLOSE_GRACE_S)
        await self._listen()

    async def _listen(self) -> None:
        context = self._certificate.context
        server = RelayServer(self._door, self._limits, pool=self._pool, ssl=context, fast_path=self._door.fast_path)
        try:
            self.port = await self._bind(server)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or self._where.chosen or self._server is not None:
                raise CannotGoOn(why_not_bound(self._where.host, self.port, error)) from error
            # A second worker on this machine, most likely: nobody asked for this very number, so any will do.
            log.warning("the usual port is taken, another is used", taken=self.port)
            self.port = 0
            self.port = await self._bind(server)
        self._server, self._secure = server, context is not None
        log.info("ingress listens", host=self._where.host or "every interface", port=self.port, tls=self._secure)

    def descriptors(self) -> list[int]:
        return self._server.descriptors() if self._server is not None else []

    async def retire(self, grace_s: float, hurry: asyncio.Event) -> None:
        """A successor accepts in our place: serve whom we have until they are done, or told to hurry."""
        if self._server is not None:
            await unless_set(hurry, self._server.retire(grace_s))

    async def _bind(self, server: RelayServer) -> int:
        inherited, self._inherited = self._inherited, []
        if usable := [sock for sock in inherited if self._fits(sock)]:
            for sock in usable:
                await server.listen_on(sock)
            port: int = usable[0].getsockname()[1]
            return port
        for sock in inherited:
            sock.close()
        if self._where.host:
            return await server.listen(self._where.host, self.port)
        try:
            # Each protocol gets its own socket, and a port of 0 would give each its own number.
            return await server.listen("" if self.port else "0.0.0.0", self.port)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            return await server.listen("0.0.0.0", self.port)  # a machine without IPv6

    def _fits(self, sock: socket.socket) -> bool:
        """Unless the settings name another port by now."""
        return not (self._where.chosen and self._where.port) or sock.getsockname()[1] == self._where.port


def why_not_bound(host: str, port: int, error: OSError) -> str:
    """One line for the person who chose the port."""
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} is in use by another program: stop it, or give this worker another --port"
        case errno.EACCES | errno.EPERM:
            return f"not allowed to listen on port {port}: give a --port above 1023"
        case errno.EADDRNOTAVAIL:
            return f"this machine has no address {host}: give another --host"
        case _:
            return f"cannot listen on {host or 'any address'} port {port}: {error.strerror or error}"
