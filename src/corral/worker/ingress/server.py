"""The listening side of the ingress: one port, plain until the cluster grants a certificate, TLS from then on. Beside
it a unix socket for a gateway on the same machine, if there is a folder for one: never TLS, the same routes and tokens.

The relay serves and `routes.py` routes; this module opens and closes the port, and applies a registration to it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from corral.contract.local_sockets import local_socket
from corral.contract.messages.nodes import IngressOffer, NodeRegistered
from corral.kit.hosts import HostPort
from corral.kit.log import get_log
from corral.kit.tasks import run_until
from corral.relay import Limits, RelayServer, UpstreamPool
from corral.worker.ingress.certificate import IngressCertificate
from corral.worker.ingress.routes import IngressRoutes
from corral.worker.ingress.tokens import TokenVerifier
from corral.worker.status import FatalError

log = get_log(__name__)
CLOSE_GRACE_S = 2.0  # for the last responses of a worker that has left


class Ingress:
    """`async with`: listens when entered, so a port that is in use ends the worker before it joins a cluster."""

    def __init__(
        self,
        where: HostPort,
        routes: IngressRoutes,
        tokens: TokenVerifier,
        certificate: IngressCertificate,
        now: Callable[[], float],
        *,
        shared_token: str = "",
        node_id: str = "",
        local_sockets: Path | None = None,
        inherited: Sequence[socket.socket] = (),
        limits: Limits | None = None,
    ) -> None:
        """`shared_token`: the token of a LocalAI controller, if the controller is one. `node_id`: of an earlier
        registration. `local_sockets`: the folder of the unix socket. `inherited`: listening sockets of the worker that
        this one takes over from."""
        self._where = where
        self._routes = routes
        self._tokens = tokens
        self._certificate = certificate
        self._now = now
        self._shared_token = shared_token
        self._inherited = [sock for sock in inherited if sock.family != socket.AF_UNIX]
        self._inherited_local = [sock for sock in inherited if sock.family == socket.AF_UNIX]
        self._node_id = node_id
        self._local_sockets = local_sockets
        self._local_path = ""  # where the server listens
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
        await self._routes.close()
        if self._pool is not None:
            await self._pool.close()

    @property
    def in_flight(self) -> int:
        """Requests to backends. A client that follows a log does not delay a worker that leaves."""
        return self._routes.in_flight.total

    async def wait_idle(self) -> None:
        """Until each backend had a moment without requests."""
        await self._routes.in_flight.wait_all_idle()

    def offer(self, advertise: str) -> IngressOffer:
        """This port, as part of a registration."""
        return IngressOffer(port=self.port, advertise=advertise, csr=self._certificate.csr, tls=self._secure)

    def csr_if_due(self) -> str:
        return self._certificate.csr_if_due(self._now())

    async def apply_registration(self, reply: NodeRegistered) -> None:
        """The node has joined: accept its cluster's tokens, and serve with TLS if the cluster has a CA."""
        self._tokens.trust(reply.signing_key, reply.id)
        self._tokens.share(self._shared_token if reply.protocol == 0 else "")
        if reply.ingress is not None and reply.ingress.certificate:
            await self.take_certificate(reply)
        else:  # a signing request went with the registration, so this cluster has no CA
            self._certificate.drop()
        self._node_id = reply.id
        if self._secure != (self._certificate.context is not None):
            await self._relisten()
        else:
            await self._listen_locally()

    async def take_certificate(self, reply: NodeRegistered) -> None:
        if reply.ingress is not None and reply.ingress.certificate:
            await asyncio.to_thread(self._certificate.accept, reply.ingress.certificate)

    async def _relisten(self) -> None:
        """Switch from plain to TLS or back, once, when a node joins. Only connections of probes break."""
        if self._server is not None:
            await self._server.drain(CLOSE_GRACE_S)
        await self._listen()

    async def _listen(self) -> None:
        context = self._certificate.context
        server = RelayServer(self._routes, self._limits, pool=self._pool, ssl=context, fast_path=self._routes.fast_path)
        try:
            self.port = await self._bind(server)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or self._where.is_chosen or self._server is not None:
                raise FatalError(explain_bind_error(self._where.host, self.port, error)) from error
            # Most likely by a second worker on this machine. No person chose this port, so any other will do.
            log.warning("the default port is in use, using another", taken=self.port)
            self.port = 0
            self.port = await self._bind(server)
        self._server, self._secure, self._local_path = server, context is not None, ""
        log.info("ingress listens", host=self._where.host or "every interface", port=self.port, tls=self._secure)
        await self._listen_locally()

    async def _listen_locally(self) -> None:
        """Listen on the unix socket of this node's id and port. Gateways do without it, so a failure is no error."""
        path = "" if self._local_sockets is None else local_socket(self._local_sockets, self._node_id, self.port)
        inherited = self._take_inherited_local(path)
        server = self._server
        if server is None or path == self._local_path:
            return
        if self._local_path:
            server.close_unix(self._local_path)
        self._local_path = path
        try:
            if inherited is not None:
                await server.listen_on_unix(inherited)
            elif path:
                await server.listen_unix(path)
        except OSError as error:
            self._local_path = ""
            log.warning("no unix socket for gateways on this machine", path=path, reason=error.strerror or str(error))

    def _take_inherited_local(self, path: str) -> socket.socket | None:
        """The unix socket of the worker before this one, if it still has this path."""
        inherited, self._inherited_local = self._inherited_local, []
        found = None
        for sock in inherited:
            if path and sock.getsockname() == path and os.path.exists(path):
                found = sock
            else:
                sock.close()
        return found

    def descriptors(self) -> list[int]:
        return self._server.descriptors() if self._server is not None else []

    async def retire(self, grace_s: float, hurry: asyncio.Event) -> None:
        """A new worker accepts connections: serve our own until they end, or until `hurry` is set."""
        if self._server is not None:
            await run_until(hurry, self._server.retire(grace_s))

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
            # IPv4 and IPv6 have a socket each, and with port 0 each would get its own port.
            return await server.listen("" if self.port else "0.0.0.0", self.port)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            return await server.listen("0.0.0.0", self.port)  # a machine without IPv6

    def _fits(self, sock: socket.socket) -> bool:
        """Whether the settings still allow this port."""
        return not (self._where.is_chosen and self._where.port) or sock.getsockname()[1] == self._where.port


def explain_bind_error(host: str, port: int, error: OSError) -> str:
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
