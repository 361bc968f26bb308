"""The port workers fetch model files from: who may come in, over which certificate, and how it is reached."""

from __future__ import annotations

import errno
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from corral.blobs.serving.server import BlobListener, IsExpected, Refusal, ServingLimits
from corral.blobs.store import BlobStore
from corral.contract.access import CONTROLLERS, AccessClaims, Scope, refusal
from corral.contract.codec import Undecodable, decode
from corral.kit.clock import Clock
from corral.kit.hosts import is_loopback
from corral.kit.log import get_log
from corral.kit.settings import BadSettings
from corral.kit.signing import BadSignature, Verifier

log = get_log(__name__)

USUAL_PORT = 8090
HOST = "{host}"
PORT = "{port}"
_LONGEST_TOKEN = 4096
_REMEMBERED = 1024
ENDED = "the token has ended: its node was deleted or replaced"


@dataclass(frozen=True)
class DoorSettings:
    host: str = "127.0.0.1"
    port: int | None = None  # None: the usual one, or any other when that is taken
    url: str = ""  # how workers reach it; empty: by the host they reach the cluster by; `{port}` is filled in here
    certificate: Path | None = None
    key: Path | None = None
    moves: bool = False  # also a port that was given gives way to another when it is taken


class TokenHolders(Protocol):
    """The part of `access.active_nodes` that the listener needs."""

    def is_current(self, node_id: str, credential: str) -> bool: ...

    def ask(self, node_id: str, credential: str) -> bool: ...


class BlobTokens:
    """May this caller have blobs? Called in threads; what was verified once is remembered."""

    def __init__(self, public_key: str, clock: Clock, nodes: TokenHolders) -> None:
        self._verifier = Verifier(public_key)
        self._clock = clock
        self._nodes = nodes
        self._verified: dict[str, AccessClaims] = {}
        self._lock = threading.Lock()

    def check(self, authorization: str) -> Refusal | None:
        token = _bearer(authorization)
        if not 0 < len(token) <= _LONGEST_TOKEN:
            return Refusal(401, "a token is needed: Authorization: Bearer …")
        claims = self._verified.get(token) or self._verify(token)
        if claims is None:
            return Refusal(401, "the token was not signed by this cluster")
        now = self._clock.now().timestamp()
        why = refusal(claims, node=CONTROLLERS, scope=Scope.BLOBS, now=now)
        if why is not None:
            return Refusal(401 if claims.exp <= now else 403, why)
        try:
            current = self._nodes.ask(claims.sub, claims.credential)
        except TimeoutError as error:
            return Refusal(503, str(error))
        return None if current else Refusal(401, ENDED)

    def has_ended(self, authorization: str) -> bool:
        """Whether the node was deleted or replaced since the token was checked."""
        claims = self._verified.get(_bearer(authorization))
        return claims is not None and not self._nodes.is_current(claims.sub, claims.credential)

    def _verify(self, token: str) -> AccessClaims | None:
        try:
            claims = decode(AccessClaims, self._verifier.verify(token))
        except (BadSignature, Undecodable):
            return None
        with self._lock:
            if len(self._verified) >= _REMEMBERED:
                self._verified.clear()  # only what was signed gets in here, so this is rare, and costs a signature each
            self._verified[token] = claims
        return claims


def _bearer(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class Certificate:
    """Of the listener; read again when its file is another: it is renewed while we run."""

    def __init__(self, certificate: Path | None, key: Path | None) -> None:
        if (certificate is None) != (key is None):
            raise BadSettings(["--blob-tls-cert and --blob-tls-key come together"])
        self._files = (certificate, key) if certificate is not None and key is not None else None
        self._context: ssl.SSLContext | None = None
        self._read_at = (0, 0)
        self._lock = threading.Lock()
        self.context()  # what cannot be read is told at the start

    def context(self) -> ssl.SSLContext | None:
        if self._files is None:
            return None
        with self._lock:
            try:
                found = (self._files[0].stat().st_mtime_ns, self._files[1].stat().st_mtime_ns)
                if found != self._read_at:
                    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                    context.minimum_version = ssl.TLSVersion.TLSv1_2
                    context.load_cert_chain(*self._files)
                    self._context, self._read_at = context, found
            except (OSError, ssl.SSLError) as error:
                if self._context is None:
                    raise BadSettings([f"--blob-tls-cert: {self._files[0]} cannot be used: {error}"]) from error
                log.warning("the blobs' certificate cannot be read, the old one is used", reason=str(error))
            return self._context


@asynccontextmanager
async def open_door(
    settings: DoorSettings,
    blobs: BlobStore,
    public_key: str,
    clock: Clock,
    nodes: TokenHolders,
    *,
    coming: IsExpected,
    limits: ServingLimits | None = None,
) -> AsyncIterator[str]:
    """Listening when entered. Yields the URL for workers, which may hold `{host}`. `coming` is told of blobs that are
    asked for and not here, and says whether they will be."""

    def find(digest: str) -> Path | None:
        blob = blobs.find(digest)
        return blob.path if blob is not None else None

    certificate = Certificate(settings.certificate, settings.key)
    tokens = BlobTokens(public_key, clock, nodes)
    async with BlobListener(
        find, tokens.check, has_ended=tokens.has_ended, is_expected=coming, tls=certificate.context, limits=limits
    ) as listener:
        port = await _listen(listener, settings)
        secure = settings.certificate is not None
        if not secure and not is_loopback(settings.host):
            log.warning("blobs are served without TLS beyond this machine", host=settings.host, port=port)
        url = settings.url.replace(PORT, str(port)) or told_url(settings.host, port, secure=secure)
        log.info("blobs are served", host=settings.host, port=port, tls=secure, url=url)
        yield url.rstrip("/")


def told_url(host: str, port: int, *, secure: bool) -> str:
    """What workers are told when nobody says: this machine is where they find the cluster, or itself. Pure."""
    everywhere = host in ("", "0.0.0.0", "::")
    named = HOST if everywhere else f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{named}:{port}"


async def _listen(listener: BlobListener, settings: DoorSettings) -> int:
    wanted = settings.port if settings.port is not None else USUAL_PORT
    try:
        return await listener.listen(settings.host, wanted)
    except OSError as error:
        if (settings.port is None or settings.moves) and error.errno == errno.EADDRINUSE:
            log.info("blobs are served on another port: the usual one is taken", port=wanted)
            return await listener.listen(settings.host, 0)  # nobody asked for this very number
        reason = error.strerror or str(error)
        raise BadSettings([f"--blob-port: {settings.host}:{wanted} cannot be used: {reason}"]) from error
