"""Certificates of one's own: a CA that is not the fleet's, and pairs that it issued."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from corral.kit.certificates import Ca, make_ca


class OwnCa:
    def __init__(self, folder: Path) -> None:
        now = datetime.now(UTC)
        made = make_ca("a CA of our own", now)
        self._ca = Ca(made.certificate_pem, made.key_pem)
        self.pem = made.certificate_pem
        self.fingerprint = self._ca.fingerprint
        self.file = folder / "own-ca.pem"
        self.file.write_text(self.pem)
        self.certificate, self.key = folder / "own.crt", folder / "own.key"

    def issue(self, *names: str, with_ca: bool = True) -> tuple[Path, Path]:
        """Replaces the pair in the folder, the key first, as the how-to says."""
        issued = self._ca.issue_server(names, datetime.now(UTC), life=timedelta(days=30))
        self.key.write_text(issued.key_pem)
        self.certificate.write_text(issued.certificate_pem + (self.pem if with_ca else ""))
        return self.certificate, self.key
