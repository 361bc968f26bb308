"""The TLS certificate of a server, read again when its files change: renewed certificates need no restart."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path

from corral.kit.errors import Invalid
from corral.kit.log import get_log

log = get_log(__name__)
Pair = tuple[bytes, bytes]  # certificate with its chain, and key


def choose_by_name(named: ServerCertificate, fallback: ServerCertificate) -> ssl.SSLContext:
    """A context that presents `named` to clients that ask for one of its host names, and `fallback` to all others:
    clients of an address ask for no name."""
    from corral.kit.certificates import covers

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        if name and covers(named.host_names, name):
            connection.context = named.context

    fallback.context.sni_callback = choose
    return fallback.context


class ServerCertificate:
    def __init__(self, certificate: Path, key: Path, *, protocols: Sequence[str] = ()) -> None:
        """`protocols`: for ALPN. Raises Invalid if the files cannot be used."""
        self._files = (certificate, key)
        self._protocols = protocols
        try:
            self._loaded = self._read()
            self.context = self._make_context(self._loaded)
            self.host_names = _host_names(self._loaded)
        except (OSError, ValueError) as error:  # errors of TLS are OSErrors
            raise Invalid(f"TLS certificate and key cannot be used: {certificate}, {key}: {error}") from error
        self._refused: Pair | None = None

    async def reload_if_changed(self) -> bool:
        """True if new connections get another certificate now. A pair that cannot be used, such as a half-written one,
        is logged once, and the old one stays."""
        found, reason = await asyncio.to_thread(self._check)
        if found in (self._loaded, self._refused):
            return False
        if reason:
            self._refused = found
            log.warning("certificate cannot be used, the old one stays", file=str(self._files[0]), reason=reason)
            return False
        # In this thread, which also does the handshakes: the library must not see a change in the middle of one.
        _load(self.context, found)
        self._loaded, self._refused = found, None
        self.host_names = _host_names(found)
        log.info("certificate reloaded", file=str(self._files[0]))
        return True

    def _check(self) -> tuple[Pair, str]:
        """The files as they are, and why they cannot be used; empty if they can."""
        found: Pair = (b"", b"")
        try:
            found = self._read()
            self._make_context(found)
            _host_names(found)
        except (OSError, ValueError) as error:
            return found, str(error)
        return found, ""

    def _read(self) -> Pair:
        return self._files[0].read_bytes(), self._files[1].read_bytes()

    def _make_context(self, pair: Pair) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._protocols:
            context.set_alpn_protocols(list(self._protocols))
        _load(context, pair)
        return context


def _host_names(pair: Pair) -> tuple[str, ...]:
    from corral.kit.certificates import host_names_of  # here: it takes 0.1 s to load, and plain HTTP needs none

    return host_names_of(pair[0].decode(errors="replace"))


def _load(context: ssl.SSLContext, pair: Pair) -> None:
    """From copies: what was checked is what is loaded, whoever replaces the files meanwhile."""
    with tempfile.TemporaryDirectory(prefix="corral-tls-") as folder:
        certificate, key = Path(folder) / "certificate", Path(folder) / "key"
        certificate.write_bytes(pair[0])
        key.touch(mode=0o600)
        key.write_bytes(pair[1])
        context.load_cert_chain(certificate, key)
