"""The one place of the CLI that reaches into other rooms: roles, the embedded bus, the store. Always lazily.

So `corral nodes list` never loads a web framework, and the import rules have one exception, here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from corral.cli.join_token import hide_token
from corral.cli.options import command_of
from corral.cli.output import DONE, tell

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
      corral gateway --controller unix:/run/corral/controller.sock --gateway-key-file gateway.key --processes 4
    """,
    "worker": """Run a worker on this machine. `corral join URL --token T` is the short way to the same.

    Flags given once are kept in settings.json of the data folder and used by later starts on it; a flag or a variable
    given then wins. Tokens and other secrets are not kept there. Give the token in CORRAL_TOKEN, in a --token-file, or
    on standard input with `--token -`.

    \b
    Examples:
      corral worker --controller https://fleet:8080 --token-file join.token --labels tier=fast
      corral worker --data /var/lib/corral/worker          (joined before: nothing else is needed)
      corral worker --port 50051                           (kept: later starts on this folder use the same port)
      corral worker reload --data /var/lib/corral/worker   (a new one takes over; no request fails)
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
    if role == "worker":
        app.command(role)(_worker_command())
    else:
        app.command(role)(command_of(settings_of(role), lambda settings: run_role(role, settings), help=_HELP[role]))
    return app


def _worker_command() -> Callable[..., int]:
    """`corral worker` runs one; `corral worker reload` finds the one at work by the same settings."""
    action = typer.Argument(metavar="[reload]", help="let a new worker take over from the one at work")
    asked: list[str] = []
    flags: dict[str, Any] = {}

    def read(given: dict[str, Any]) -> dict[str, Any]:
        if (word := given.pop("action")) is not None:
            if word != "reload":
                raise typer.BadParameter(f"{word!r} is not something a worker can be told; `reload` is")
            asked.append(word)
        if not asked:
            flags.update(hide_token(given))
        return given | flags

    def run(settings: Any) -> int:
        return reload_worker(settings) if asked else run_worker(settings, flags)

    arguments = {"action": Annotated[str | None, action]}
    return command_of(
        settings_of("worker"),
        run,
        help=_HELP["worker"],
        arguments=arguments,
        read=read,
        remembered=remembered_settings,
    )


def remembered_settings(settings: Any) -> tuple[Path, dict[str, Any]]:
    """What earlier starts of the worker on its data folder were given, and where that is kept."""
    from corral.worker import remembered

    return settings.data / remembered.FILE, dict(remembered.read(settings.data))


def run_worker(settings: Any, flags: dict[str, Any]) -> int:
    from corral.worker import remembered
    from corral.worker.main import run

    return run(settings, remembered.choose(settings, flags))


def reload_worker(settings: Any) -> int:
    from corral.worker.handover import ask_to_reload

    before, after = ask_to_reload(settings.data, timeout_s=settings.reload_timeout_s)
    tell(f"process {before} has handed over to process {after}")
    return DONE


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


def find_bus_program() -> tuple[str, str]:
    """Where nats-server is, and its version. `NotFound` says what to install."""
    from corral.bus.binary import find_nats_server, version_of

    binary = find_nats_server()
    version = version_of(binary) or ()
    return str(binary), ".".join(map(str, version))


def wanted_schema() -> tuple[str, str]:
    """The table that holds a database's schema version, and the version this program wants."""
    from corral.store.engine.migrate import VERSION_TABLE, head_of

    return VERSION_TABLE, head_of()


async def live_controllers(store_url: str, *, within_s: float) -> list[str]:
    """Hosts of controllers that have used this database so lately. None where there is no database yet."""
    from corral.store import open_store
    from corral.store.engine.sqlite import sqlite_path
    from corral.store.tables import controllers

    if store_url.startswith("sqlite:") and not sqlite_path(store_url.partition("://")[2]).exists():
        return []
    async with open_store(store_url) as store, store.read() as tx:
        return [each.host for each in await controllers.list_live(tx, within_s=within_s)]


async def copy_store(origin: str, target: str, step: Callable[[str, int, int], None]) -> list[tuple[str, int]]:
    """Everything from one database into another; tables and their rows. `step` hears table, copied, total."""
    from corral.store.copy import migrate_store

    copied = await migrate_store(
        origin, target, on_progress=lambda progress: step(progress.table, progress.copied, progress.total)
    )
    return [(each.table, each.rows) for each in copied]
