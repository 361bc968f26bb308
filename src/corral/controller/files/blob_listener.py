"""The port from which workers fetch model files: access tokens, TLS certificate and URL."""

from __future__ import annotations

import errno
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from corral.blobs.serving.server import BlobListener, Find, FindGrowing, IsExpected, ListChunks, Refusal, ServingLimits
from corral.blobs.store import BlobStore
from corral.contract.access import CONTROLLERS, AccessClaims, Scope, refusal
from corral.contract.codec import Undecodable, decode
from corral.controller.settings.models import FileSettings
from corral.kit.clock import Clock
from corral.kit.hosts import is_loopback
from corral.kit.log import get_log
from corral.kit.settings import BadSettings
from corral.kit.signing import BadSignature, Verifier
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store
from corral.store.tables import controllers

log = get_log(__name__)

DEFAULT_PORT = 8090
HOST = "{host}"
PORT = "{port}"
MAX_TOKEN_LENGTH = 4096
MAX_VERIFIED = 1024  # tokens
ENDED = "the token has ended: its node was deleted or replaced"


class TokenHolders(Protocol):
    """The part of `access.active_nodes` that the listener needs."""

    def is_current(self, node_id: str, credential: str) -> bool: ...

    def ask(self, node_id: str, credential: str) -> bool: ...


class BlobTokens:
    """Checks the tokens of callers. Called in threads; verified tokens are cached."""

    def __init__(self, public_key: str, clock: Clock, nodes: TokenHolders) -> None:
        self._verifier = Verifier(public_key)
        self._clock = clock
        self._nodes = nodes
        self._verified: dict[str, AccessClaims] = {}
        self._lock = threading.Lock()

    def check(self, authorization: str) -> Refusal | None:
        token = _bearer(authorization)
        if not 0 < len(token) <= MAX_TOKEN_LENGTH:
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
            if len(self._verified) >= MAX_VERIFIED:
                self._verified.clear()  # only signed tokens get in here, so this is rare; each is verified once more
            self._verified[token] = claims
        return claims


def _bearer(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class Certificate:
    """The listener's certificate; read again when its file changes, because it is renewed while the controller runs."""

    def __init__(self, certificate: Path | None, key: Path | None) -> None:
        if (certificate is None) != (key is None):
            raise BadSettings(["--blob-tls-cert and --blob-tls-key come together"])
        self._files = (certificate, key) if certificate is not None and key is not None else None
        self._context: ssl.SSLContext | None = None
        self._read_at = (0, 0)
        self._lock = threading.Lock()
        self.context()  # an unreadable file is reported at the start

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
                log.warning("the certificate for blobs cannot be read, the old one stays in use", reason=str(error))
            return self._context


@asynccontextmanager
async def open_blob_listener(
    settings: FileSettings,
    blobs: BlobStore,
    public_key: str,
    clock: Clock,
    nodes: TokenHolders,
    *,
    is_expected: IsExpected,
    find: Find | None = None,
    find_growing: FindGrowing | None = None,
    list_chunks: ListChunks | None = None,
    limits: ServingLimits | None = None,
) -> AsyncIterator[str]:
    """Listens when entered. Yields the URL for workers, which may contain `{host}`. `is_expected` gets the digest of a
    requested blob that is not here, and returns whether it will be. `find`: of a blob, also in another store;
    `find_growing` for those that are being fetched; `list_chunks` makes the chunk list of a blob of either store."""

    def find_here(digest: str) -> Path | None:
        blob = blobs.find(digest)
        return blob.path if blob is not None else None

    certificate = Certificate(settings.blob_tls_cert, settings.blob_tls_key)
    tokens = BlobTokens(public_key, clock, nodes)
    async with BlobListener(
        find or find_here,
        tokens.check,
        has_ended=tokens.has_ended,
        find_growing=find_growing or (lambda _digest: None),
        is_expected=is_expected,
        list_chunks=list_chunks or blobs.chunk_list,
        tls=certificate.context,
        limits=limits,
    ) as listener:
        port = await _listen(listener, settings)
        secure = settings.blob_tls_cert is not None
        if not secure and not is_loopback(settings.blob_host):
            log.warning("blobs are served without TLS beyond this machine", host=settings.blob_host, port=port)
        url = settings.blob_url.replace(PORT, str(port)) or default_url(settings.blob_host, port, secure=secure)
        log.info("blobs are served", host=settings.blob_host, port=port, tls=secure, url=url)
        yield url.rstrip("/")


def default_url(host: str, port: int, *, secure: bool) -> str:
    """The URL for workers when none is configured; on all interfaces it contains `{host}`. Pure."""
    everywhere = host in ("", "0.0.0.0", "::")
    named = HOST if everywhere else f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{named}:{port}"


async def _listen(listener: BlobListener, settings: FileSettings) -> int:
    wanted = settings.blob_port if settings.blob_port is not None else DEFAULT_PORT
    try:
        return await listener.listen(settings.blob_host, wanted)
    except OSError as error:
        if (settings.blob_port is None or settings.blob_port_moves) and error.errno == errno.EADDRINUSE:
            log.info("blobs are served on another port: the default one is taken", port=wanted)
            return await listener.listen(settings.blob_host, 0)  # no particular port is required
        reason = error.strerror or str(error)
        raise BadSettings([f"--blob-port: {settings.blob_host}:{wanted} cannot be used: {reason}"]) from error


class ControllerBlobUrls:
    """Where controllers serve their copies of model files: a node may fetch from any of them."""

    name = "blob urls"

    def __init__(self, store: Store, clock: Clock, *, own: str, live_for_s: float, every_s: float) -> None:
        """`own`: this controller's URL. Others count as alive for `live_for_s` after their last sign of life."""
        self._store = store
        self._clock = clock
        self._live_for_s = live_for_s
        self._every_s = every_s
        self.own = own
        self.others: tuple[str, ...] = ()

    async def run(self) -> None:
        await run_every(self.name, self._every_s, self.run_once, clock=self._clock)

    async def run_once(self) -> None:
        async with self._store.read() as tx:
            live = await controllers.list_live(tx, within_s=self._live_for_s)
        self.others = tuple(dict.fromkeys(each.blob_url for each in live if each.blob_url not in ("", self.own)))
