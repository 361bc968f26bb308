"""The only module of the CLI that imports other packages (roles, embedded bus, store), and only inside functions.

So `corral nodes list` never loads a web framework.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from corral.cli.common.output import DONE, FAILED, OnTableProgress, print_error, print_line, print_note
from corral.kit.process import paused_gc


def settings_of(role: str) -> type[Any]:
    """The settings class of a role, and of `corral up`."""
    module = importlib.import_module(f"corral.{'cli.up' if role == 'up' else role}.settings")
    kind: type[Any] = getattr(module, f"{role.capitalize()}Settings")
    return kind


def run_role(role: str, settings: Any) -> int:
    """Run the role until it ends and return its exit code."""
    with paused_gc():
        module = importlib.import_module(f"corral.{role}.main")
        return int(module.run(settings) or 0)


def saved_settings(settings: Any) -> tuple[Path, dict[str, Any]]:
    """The settings that earlier starts of the worker saved in its data folder, and their file."""
    from corral.worker.settings import saved

    return settings.node.data / saved.FILE, dict(saved.read(settings.node.data))


def run_worker(
    settings: Any, flags: dict[str, Any], watch: Callable[[Any], Coroutine[Any, Any, None]] | None = None
) -> int:
    """`watch` runs along with the status of the worker."""
    with paused_gc():
        from corral.worker.main import run
        from corral.worker.settings import saved

        return run(settings, saved.choose(settings, flags), watch)


def save_worker_settings(settings: Any, flags: dict[str, Any]) -> None:
    """As a worker does that starts with these flags. Raises `FatalError` while another worker uses the folder."""
    from corral.worker.agent.join.identity import hold_folder
    from corral.worker.settings import saved

    with hold_folder(settings.node.data):
        saved.save(settings.node.data, saved.choose(settings, flags))


def reload_worker(settings: Any) -> int:
    from corral.worker.reload.handover import ask_to_reload

    before, after = ask_to_reload(settings.node.data, timeout_s=settings.shutdown.reload_timeout_s)
    print_line(f"The worker with pid {before} has handed over to the new one with pid {after}.")
    return DONE


def upgrade_worker(settings: Any, wheel: Path, packages: Path | None) -> int:
    from corral.worker.upgrade.trial import TrialState
    from corral.worker.upgrade.upgrade import upgrade

    ended = upgrade(settings.node.data, wheel, print_note, packages=packages)
    if ended.state is TrialState.DONE:
        print_line(f"The worker runs the new version in {ended.new}.")
        return DONE
    back = "the old version serves again" if ended.state is TrialState.RETURNED else "the old version is not ready yet"
    print_error(f"{ended.reason}; {back}. The worker's own log says why.")
    return FAILED


@dataclass(frozen=True)
class VersionFolder:
    """The folder of versions of Corral that this program runs from."""

    program: Path
    find_current: Callable[[], Path]
    is_upgrading: Callable[[], bool]  # a version is being built or tried


def find_version_folder() -> VersionFolder | None:
    """None where Corral was installed in another way."""
    from corral.worker.upgrade.upgrade import is_upgrading
    from corral.worker.upgrade.versions import find_versions

    program = Path(sys.prefix).resolve()
    versions = find_versions(program)
    if versions is None:
        return None
    return VersionFolder(program, lambda: versions.current, lambda: is_upgrading(versions))


def install_version(root: Path, wheel: Path, packages: Path | None) -> tuple[Path, str]:
    """Build the version of a wheel in a folder of versions, and make it current. Returns its command, and the version.
    Blocking. Raises Invalid and Failed."""
    from corral.worker.upgrade.build import build, read_wheel
    from corral.worker.upgrade.versions import VERSIONS, Versions

    found, versions = read_wheel(wheel), Versions(root)
    (root / VERSIONS).mkdir(parents=True, exist_ok=True)
    versions.make_current(build(versions, found, packages=packages, env=os.environ))
    return Path(versions.command), found.version


def describe_wheel(path: Path) -> tuple[str, str, int]:
    """Version, SHA-256 and size of a wheel of Corral."""
    from corral.worker.upgrade.build import read_wheel

    wheel = read_wheel(path)
    return wheel.version, wheel.sha256, path.stat().st_size


@dataclass(frozen=True)
class BusServerSettings:
    folder: Path
    keys: Path
    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None


def prepare_bus(place: BusServerSettings) -> tuple[str, ...]:
    """Write keys and configuration of the embedded nats-server and return its command line."""
    from corral.bus.embedded import ServerSettings, ServerTls, prepare_server
    from corral.bus.keys import load_or_create_keys

    tls = ServerTls(place.certificate, place.key) if place.certificate and place.key else None
    settings = ServerSettings(folder=place.folder, host=place.host, port=place.port, tls=tls)
    return prepare_server(settings, load_or_create_keys(place.keys, datetime.now(UTC))).argv


def make_bus_keys(folder: Path) -> None:
    """Create the keys of the bus in this folder, unless they are there."""
    from corral.bus.keys import load_or_create_keys

    load_or_create_keys(folder, datetime.now(UTC))


def find_bus_server() -> tuple[str, str]:
    """Path and version of nats-server. The message of `NotFound` says what to install."""
    from corral.bus.binary import find_nats_server, version_of

    binary = find_nats_server()
    version = version_of(binary) or ()
    return str(binary), ".".join(map(str, version))


def expected_schema() -> tuple[str, str]:
    """The table with the schema version of a database, and the version that this program needs."""
    from corral.store.engine.migrate import VERSION_TABLE, head_of

    return VERSION_TABLE, head_of()


async def live_controllers(store_url: str, *, within_s: float, may_migrate: bool = True) -> list[str]:
    """Hosts of the controllers that used this database within the last `within_s`; none if it does not exist."""
    from corral.store import open_store
    from corral.store.engine.sqlite import sqlite_path
    from corral.store.tables import controllers

    if store_url.startswith("sqlite:") and not sqlite_path(store_url.partition("://")[2]).exists():
        return []
    async with open_store(store_url, may_migrate=may_migrate) as store, store.read() as tx:
        return [each.host for each in await controllers.list_live(tx, within_s=within_s)]


async def copy_store(origin: str, target: str, on_progress: OnTableProgress) -> list[tuple[str, int]]:
    """Copy all tables into another database; return each table with its number of rows. `on_progress` gets the table,
    the copied rows and the total rows."""
    from corral.store.copy import migrate_store

    copied = await migrate_store(
        origin, target, on_progress=lambda progress: on_progress(progress.table, progress.copied, progress.total)
    )
    return [(each.table, each.rows) for each in copied]


async def dump_store(
    url: str, file: Path, *, backup_id: str, created_at: datetime, with_secrets: bool, on_progress: OnTableProgress
) -> dict[str, int]:
    """Dump the database into a SQLite file; return the rows by table."""
    from corral.store import backup

    copied = await backup.dump_store(
        url,
        file,
        backup.BackupMark(id=backup_id, created_at=created_at),
        with_secrets=with_secrets,
        on_progress=lambda progress: on_progress(progress.table, progress.copied, progress.total),
    )
    return {each.table: each.rows for each in copied}


async def load_store(file: Path, url: str, on_progress: OnTableProgress) -> dict[str, int]:
    """Copy a dump into an empty database; return the rows by table."""
    from corral.store import backup

    copied = await backup.load_store(
        file, url, on_progress=lambda progress: on_progress(progress.table, progress.copied, progress.total)
    )
    return {each.table: each.rows for each in copied}


async def require_empty_store(url: str) -> None:
    from corral.store import backup

    await backup.require_empty(url)


async def find_backup_id(url: str) -> str:
    """The backup from which the data of a database was restored; empty if it was not."""
    from corral.store import backup

    mark = await backup.find_mark(url)
    return mark.id if mark else ""


def check_schema(schema: str) -> None:
    """Raises `Invalid` if the schema of a dump is newer than this program's."""
    from corral.store import backup

    backup.check_schema(schema)
