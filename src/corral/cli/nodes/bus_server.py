"""`corral bus`: the NATS server of a fleet with several controllers, as `corral up` runs it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from corral.cli.common import declare
from corral.cli.common.roles import BusServerSettings, prepare_bus
from corral.cli.common.settings_command import settings_command
from corral.kit.process import HOME_DATA, resolve_data
from corral.kit.settings import BadSettings, setting, valid_port

_HELP = """Run the bus of a fleet by itself: NATS with the accounts of the fleet.

`corral up` has a bus already. With several controllers, run one bus and give its URL to each of them (--bus-urls). The
keys are those of `corral secrets create`, or are created. The process becomes nats-server.

\b
Examples:
  corral bus --bus-keys ~/fleet/bus
  corral bus --bus-keys ~/fleet/bus --host 0.0.0.0 --tls-cert ~/fleet/server.crt --tls-key ~/fleet/server.key
"""


@dataclass(frozen=True)
class BusRoleSettings:
    bus_keys: Path = setting("folder with the keys of the bus, of `corral secrets create`; created if missing")
    data: Path = setting(
        "folder of configuration and revocations; root uses /var/lib/corral/bus unless the default exists already",
        default=HOME_DATA / "bus",
    )
    host: str = setting("address to listen on", default="127.0.0.1")
    port: int = setting("port to listen on", default=4222, check=valid_port)
    tls_cert: Path | None = setting("certificate (PEM); with it the bus speaks TLS only", default=None)
    tls_key: Path | None = setting("key of that certificate (PEM)", default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", resolve_data(self.data))
        for name in ("bus_keys", "tls_cert", "tls_key"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, path.expanduser().absolute())
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadSettings(["--tls-cert and --tls-key must be given together"])


def run(settings: BusRoleSettings) -> int:
    for flag, path in (("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key)):
        if path is not None and not path.is_file():
            raise BadSettings([f"{flag}: there is no file {path}"])
    command = prepare_bus(
        BusServerSettings(
            folder=settings.data,
            keys=settings.bus_keys,
            host=settings.host,
            port=settings.port,
            certificate=settings.tls_cert,
            key=settings.tls_key,
        )
    )
    os.execv(command[0], command)


def bus_app() -> declare.App:
    app = declare.App()
    app.command("bus")(settings_command(BusRoleSettings, run, help=_HELP))
    return app
