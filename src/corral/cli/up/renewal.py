"""A fleet may run for years: the server certificate is renewed while it runs.

Also when the machine's main address is no longer in it. Other new addresses wait for the next start: they come and go
with every container network, and renewing costs the gateway a restart.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from corral.cli.folder import DataFolder
from corral.cli.up.machine import main_address
from corral.cli.up.prepare import make_certificates, needs_renewal, read_or_empty
from corral.cli.up.supervisor import Supervisor
from corral.kit.clock import Clock
from corral.kit.errors import CorralError


class Renewal:
    def __init__(
        self,
        folder: DataFolder,
        names: Callable[[], tuple[str, ...]],
        supervisor: Supervisor,
        clock: Clock,
        tell: Callable[[str], None],
        *,
        main: Callable[[], str] = main_address,
    ) -> None:
        self._folder = folder
        self._names = names
        self._supervisor = supervisor
        self._clock = clock
        self._tell = tell
        self._main = main

    async def run(self, interval_s: float) -> None:
        while True:
            await self._clock.sleep(interval_s)
            try:
                self.look()
            except (OSError, CorralError) as error:
                self._tell(f"the server certificate could not be renewed: {error}")

    def look(self) -> bool:
        """Whether it was renewed. The bus reads its files anew on SIGHUP; the gateway is restarted, in order."""
        folder = self._folder
        certificate, key, ca = map(read_or_empty, (folder.server_cert, folder.server_key, folder.ca_cert))
        if not needs_renewal(certificate, key, (self._main(),), ca, self._clock.now()):
            return False
        make_certificates(folder, (*self._names(), self._main()), self._clock.now())
        self._tell("the server certificate was renewed; the gateway restarts to use it")
        if bus := self._supervisor.children.get("bus"):
            bus.signal(signal.SIGHUP)
        if gateway := self._supervisor.children.get("gateway"):
            gateway.restart()
        return True
