"""Renews the server certificate while the fleet runs: before it expires, or when the main address has changed.

Other new addresses wait for the next start: container networks add and remove them often, and each renewal restarts the
gateway.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from corral.cli.common.data_folder import DataFolder
from corral.cli.up.machine import main_address
from corral.cli.up.prepare import make_certificates, needs_renewal, read_or_empty
from corral.cli.up.supervisor import Supervisor
from corral.kit.clock import Clock
from corral.kit.errors import CorralError


class CertificateRenewal:
    def __init__(
        self,
        folder: DataFolder,
        names: Callable[[], tuple[str, ...]],
        supervisor: Supervisor,
        clock: Clock,
        report: Callable[[str], None],
        *,
        main: Callable[[], str] = main_address,
    ) -> None:
        self._folder = folder
        self._names = names
        self._supervisor = supervisor
        self._clock = clock
        self._report = report
        self._main = main

    async def run(self, interval_s: float) -> None:
        while True:
            await self._clock.sleep(interval_s)
            try:
                self.run_once()
            except (OSError, CorralError) as error:
                self._report(f"cannot renew the server certificate: {error}")

    def run_once(self) -> bool:
        """Renew the certificate if necessary; True if renewed. The bus reloads on SIGHUP, the gateway restarts."""
        folder = self._folder
        certificate, key, ca = map(read_or_empty, (folder.server_cert, folder.server_key, folder.ca_cert))
        if not needs_renewal(certificate, key, (self._main(),), ca, self._clock.now()):
            return False
        make_certificates(folder, (*self._names(), self._main()), self._clock.now())
        self._report("renewed the server certificate; the gateway restarts to use it")
        if bus := self._supervisor.children.get("bus"):
            bus.signal(signal.SIGHUP)
        if gateway := self._supervisor.children.get("gateway"):
            gateway.restart()
        return True
