"""`corral backup` and `corral restore`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from corral import __version__
from corral.cli.backup.archive import BackupFile, BackupHeader, Source, write_backup
from corral.cli.backup.output_file import Overwrite, check_target, explain_os_errors
from corral.cli.backup.parts import STORE, machine_id, read_parts
from corral.cli.backup.passphrase import ask_passphrase, check_strength, choose_passphrase, given_passphrase
from corral.cli.backup.restore import RestorePlan, plan_restore, restore
from corral.cli.common import declare
from corral.cli.common.data_folder import DataFolder, chosen_folder, data_folder, refuse_unfinished_restore
from corral.cli.common.options import Context, Data, DryRun, Json
from corral.cli.common.output import (
    DONE,
    OnTableProgress,
    print_json,
    print_line,
    print_note,
    table_progress,
)
from corral.cli.common.roles import dump_store, expected_schema, live_controllers
from corral.kit.errors import Conflict
from corral.kit.files import replace_file
from corral.kit.humanize import format_bytes
from corral.kit.process import lock_holder
from corral.kit.redact import redact_urls

backup_app = declare.App()
restore_app = declare.App()
PassphraseFile = Annotated[
    str | None,
    declare.Option(
        "--passphrase-file", metavar="FILE", help="file with the passphrase, in one line (CORRAL_BACKUP_PASSPHRASE)"
    ),
]
StoreUrl = Annotated[
    str | None,
    declare.Option(
        "--store",
        metavar="URL",
        envvar="CORRAL_STORE",
        help="database; without it, the SQLite database of the data folder (CORRAL_STORE)",
    ),
]
_COUNTED = {"nodes": "node", "models": "model", "api_keys": "API key", "operations": "operation", "receipts": "request"}
_WORKING = ".backup"
_ALIVE_WITHIN_S = 120.0


@backup_app.command("backup")
def backup(
    command_context: declare.Context,
    file: Annotated[str, declare.Argument(metavar="FILE", help="file to write")],
    with_secrets: Annotated[
        bool, declare.Option("--with-secrets", help="include keys, CA and credentials, sealed with a passphrase")
    ] = False,
    passphrase_file: PassphraseFile = None,
    overwrite: Overwrite = False,
    data: Data = None,
    store: StoreUrl = None,
    context: Context = None,
    as_json: Json = False,
) -> int:
    """Write the state of a fleet of this machine into one file.

    The fleet may run meanwhile: the file has one moment of its database.

    It contains nodes, models, schedules, rules, API keys (their hashes), operations and receipts. It does not contain
    model files, backends and join tokens.

    With a passphrase it also contains the secrets: the CA, the keys of the bus and of the cluster, the admin key. Then
    nodes reconnect by themselves after a restore. A passphrase comes from --passphrase-file, CORRAL_BACKUP_PASSPHRASE
    or, with --with-secrets, from a prompt.

    \b
    Examples:
      corral backup fleet.backup --with-secrets
      corral backup /mnt/backups/fleet.backup --passphrase-file ~/passphrase --overwrite
      corral backup fleet.backup          (without secrets: machines with TLS must join again after a restore)
    """
    folder = chosen_folder(data, context or command_context.find_root().params.get("fleet"))
    target = check_target(file, overwrite=overwrite)
    refuse_unfinished_restore(folder)
    passphrase = given_passphrase(passphrase_file)
    if passphrase is None and with_secrets:
        passphrase = choose_passphrase()
    if passphrase is not None:
        check_strength(passphrase)
    url = store or f"sqlite:///{folder.database}"
    _refuse_unused_store(folder, url)
    with table_progress(quiet=as_json) as on_progress, explain_os_errors(target):
        header, rows = _write(folder, url, target, passphrase, on_progress)
    _print_backup(target, folder, header, rows, as_json=as_json)
    return DONE


def _refuse_unused_store(folder: DataFolder, url: str) -> None:
    """A fleet that moved to PostgreSQL leaves its old SQLite database in the folder: a backup of it would be old."""
    if lock_holder(folder.lock) is None:
        return
    if not asyncio.run(live_controllers(url, within_s=_ALIVE_WITHIN_S, may_migrate=False)):
        raise Conflict(
            f"the fleet in {folder.root} runs, and its controller does not use the database {redact_urls(url)}: "
            "give the one that it uses (--store or CORRAL_STORE), or try again when the controller has started"
        )


def _write(
    folder: DataFolder, url: str, target: Path, passphrase: str | None, on_progress: OnTableProgress
) -> tuple[BackupHeader, dict[str, int]]:
    header = BackupHeader(
        id=str(uuid.uuid4()),
        created_at=datetime.now(UTC),
        corral=__version__,
        schema=expected_schema()[1],
        store="sqlite" if url.startswith("sqlite:") else "postgresql",
        host=socket.gethostname(),
        machine=machine_id(),
        has_secrets=passphrase is not None,
    )
    with _working_folder(folder) as working:
        dump = working / STORE
        rows = asyncio.run(
            dump_store(
                url,
                dump,
                backup_id=header.id,
                created_at=header.created_at,
                with_secrets=header.has_secrets,
                on_progress=on_progress,
            )
        )
        sources: dict[str, Source] = {STORE: dump, **read_parts(folder, with_secrets=header.has_secrets)}
        replace_file(target, lambda file: write_backup(file, header, sources, passphrase=passphrase))
    return header, rows


@contextlib.contextmanager
def _working_folder(folder: DataFolder) -> Iterator[Path]:
    """A private folder for the dump, in the data folder: there its secrets are as safe as those of the database. What a
    killed backup left there is removed."""
    if not folder.root.is_dir():
        with tempfile.TemporaryDirectory() as elsewhere:
            yield Path(elsewhere)
        return
    path = folder.root / _WORKING
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another backup of {folder.root} is being written: wait until it is complete") from None
        for each in path.iterdir():
            each.unlink()
        yield path
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _print_backup(
    target: Path, folder: DataFolder, header: BackupHeader, rows: Mapping[str, int], *, as_json: bool
) -> None:
    size = target.stat().st_size
    if as_json:
        print_json(
            {
                "file": str(target),
                "size_bytes": size,
                "id": header.id,
                "created_at": header.created_at.isoformat(),
                "has_secrets": header.has_secrets,
                "rows": dict(rows),
            }
        )
        return
    print_line(f"Wrote {target} ({format_bytes(size)}) from {folder.root}: {_count(rows)}.")
    if header.has_secrets:
        print_note("Keep the passphrase somewhere else: without it nobody can open this file.")
    else:
        print_note(
            "Without secrets (--with-secrets includes them): after a restore the fleet has new keys, and machines that "
            "use TLS must join again."
        )
    print_note("Model files are not in it. Restore with `corral restore FILE`.")


@restore_app.command("restore")
def restore_command(
    file: Annotated[str, declare.Argument(metavar="FILE", help="file that `corral backup` wrote")],
    passphrase_file: PassphraseFile = None,
    dry_run: DryRun = False,
    data: Data = None,
    store: StoreUrl = None,
    as_json: Json = False,
) -> int:
    """Restore a fleet from a backup.

    The backup may come from another machine, and from SQLite or PostgreSQL. The fleet must be stopped, and the data
    folder and the database must be empty. Everything is checked before anything is changed. The same command completes
    an interrupted restore.

    The passphrase of a backup with secrets comes from --passphrase-file, CORRAL_BACKUP_PASSPHRASE or a prompt.

    \b
    Examples:
      corral restore fleet.backup --dry-run
      corral restore fleet.backup --passphrase-file ~/passphrase
      corral restore fleet.backup --store postgresql://corral@db/corral
    """
    folder = data_folder(data)
    url = store or f"sqlite:///{folder.database}"
    with BackupFile.open(Path(file).expanduser().absolute()) as opened:
        passphrase = None
        if opened.is_sealed:
            passphrase = given_passphrase(passphrase_file) or ask_passphrase()
        rows: Mapping[str, int] = {}
        if dry_run:
            with explain_os_errors(folder.root):
                plan = plan_restore(opened, passphrase, folder, url)
        else:
            with table_progress(quiet=as_json) as on_progress:
                plan, rows = restore(opened, passphrase, folder, url, on_progress=on_progress)
    _print_restore(plan, rows, folder, dry_run=dry_run, as_json=as_json)
    return DONE


def _print_restore(
    plan: RestorePlan, rows: Mapping[str, int], folder: DataFolder, *, dry_run: bool, as_json: bool
) -> None:
    header = plan.header
    if as_json:
        print_json(
            {
                "id": header.id,
                "created_at": header.created_at.isoformat(),
                "corral": header.corral,
                "host": header.host,
                "has_secrets": header.has_secrets,
                "dry_run": dry_run,
                "files": list(plan.placed),
                "skipped": list(plan.skipped),
                "rows": dict(rows),
            }
        )
        return
    made = f"the backup of {header.created_at:%Y-%m-%d %H:%M} UTC from {header.host}"
    if dry_run:
        print_line(f"Nothing was changed. {made[0].upper()}{made[1:]} is whole and can be restored into {folder.root}.")
    else:
        print_line(f"Restored {made} into {folder.root}" + (f": {_count(rows)}." if rows else "."))
    if not header.has_secrets:
        print_note(
            "The backup has no secrets: the fleet gets new ones at its next start. API keys stay valid; the admin key "
            "of this machine is new. Machines that use TLS must join again with a new line of `corral token create`, "
            "and keep their place; machines without TLS reconnect by themselves."
        )
    print_note("Join tokens are not in a backup: `corral token create` makes new ones. Start the fleet: `corral up`")


def _count(rows: Mapping[str, int]) -> str:
    return ", ".join(
        f"{rows.get(table, 0)} {noun}{'' if rows.get(table, 0) == 1 else 's'}" for table, noun in _COUNTED.items()
    )
