"""What proves a gateway's identity, by the host name of its URL: the CA of the fleet, or a certificate of one's own.

The file of that certificate is read again when it changed. A file that cannot be used is logged, and the old one stays.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from corral.kit.certificate_chain import CertificateChain, read_chain
from corral.kit.certificates import Ca, fingerprint
from corral.kit.errors import Invalid
from corral.kit.log import get_log
from corral.kit.threads import run_uncancelled

log = get_log(__name__)


class GatewayTrust:
    def __init__(self, ca: Ca | None, certificate: Path | None = None) -> None:
        """Raises Invalid if the file cannot be used."""
        self._ca = ca
        self._file = certificate
        self._pem = b""
        self._chain: CertificateChain | None = None
        self._is_public = False
        if certificate is not None:
            try:
                self._read(certificate)
            except (OSError, ValueError) as error:
                raise Invalid(f"--gateway-cert: {certificate} cannot be used: {error}") from error

    @property
    def depends_on_name(self) -> bool:
        return self._chain is not None

    async def pin(self, url: str) -> str:
        """For `--ca` of a machine that joins at this URL; empty: the CAs of the system."""
        if not url.startswith("https://"):
            return ""
        certificate = await self._own(url)
        if certificate is not None:
            return "" if self._is_public else fingerprint(certificate.top_pem)
        return self._ca.fingerprint if self._ca else ""

    async def bundle(self, url: str) -> str:
        """All certificates that clients may have to trust, first the one of this URL. Empty: those of the system."""
        certificate = await self._own(url)
        own = self._chain.top_pem if self._chain is not None and not self._is_public else ""
        ca = self._ca.certificate_pem if self._ca else ""
        return own + ca if certificate is not None else ca + own

    async def _own(self, url: str) -> CertificateChain | None:
        """The certificate of one's own, if gateways present it for this URL."""
        await run_uncancelled(self._refresh)
        host = urlsplit(url).hostname or ""
        return self._chain if self._chain is not None and self._chain.covers(host) else None

    def _refresh(self) -> None:
        if self._file is None:
            return
        try:
            self._read(self._file)
        except (OSError, ValueError) as error:
            log.warning("certificate cannot be used, the old one stays", file=str(self._file), reason=str(error))

    def _read(self, file: Path) -> None:
        pem = file.expanduser().read_bytes()
        if pem != self._pem:
            chain = read_chain(pem)
            self._is_public = chain.is_trusted_by_system()
            self._chain, self._pem = chain, pem
