"""The one place of the CLI that reaches into other rooms: roles, the embedded bus, the store. Always lazily.

So `corral nodes list` never loads a web framework, and the import rules have one exception, here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from corral.cli.options import command_of

_HELP = {
    "controller": """Run a controller: registry, admin API, web page.

    \b
    Examples:
      corral controller --data /var/lib/corral --socket /run/corral/controller.sock
      CORRAL_STORE=postgresql://corral@db/corral corral controller --port 8081
    """,
    "gateway": """Run a gateway: the one public port.

    \b
    Examples:
      corral gateway --controller unix:/run/corral/controller.sock --gateway-key-file /etc/corral/gateway.key
      corral gateway --controller https://10.0.0.2:8081 --host 0.0.0.0 --tls-cert srv.crt --tls-key srv.key
    """,
    "worker": """Run a worker on this machine. `corral join URL --token T` is the short way to the same.

    \b
    Examples:
      corral worker --controller https://fleet:8080 --token-file join.token --labels tier=fast
      corral worker --data /var/lib/corral/worker          (joined before: nothing else is needed)
    """,
}


def settings_of(role: str) -> type[Any]:
    """The settings class of a role."""
    module = importlib.import_module(f"corral.{role}.settings")
    kind: type[Any] = getattr(module, f"{role.capitalize()}Settings")
    return kind


def run_role(role: str, settings: Any) -> int:
    """Until it ends; its exit code."""
    module = importlib.import_module(f"corral.{role}.main")
    return int(module.run(settings) or 0)


def role_app(role: str) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(role)(command_of(settings_of(role), lambda settings: run_role(role, settings), help=_HELP[role]))
    return app


@dataclass(frozen=True)
class BusPlace:
    folder: Path
    keys: Path
    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None


def prepare_bus(place: BusPlace) -> tuple[str, ...]:
    """Keys, configuration and command line of our own nats-server."""
    from corral.bus.embedded import ServerSettings, ServerTls, prepare_server
    from corral.bus.keys import load_or_create_keys

    tls = ServerTls(place.certificate, place.key) if place.certificate and place.key else None
    settings = ServerSettings(folder=place.folder, host=place.host, port=place.port, tls=tls)
    return prepare_server(settings, load_or_create_keys(place.keys, datetime.now(UTC))).argv
