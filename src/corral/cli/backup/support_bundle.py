"""`corral support-bundle`: one archive that a person can send to somebody who helps. It contains no secrets.

Each part is collected on its own, because a bundle is made when something does not work: a part that fails leaves its
error in the bundle.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import shutil
import sqlite3
import ssl
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, Any

import psutil

from corral import __version__
from corral.cli.backup.masking import Masker, known_secrets
from corral.cli.backup.output_file import Overwrite, check_target, explain_os_errors
from corral.cli.common import declare
from corral.cli.common.data_folder import DataFolder, chosen_folder
from corral.cli.common.options import Ca, Context, Data, Json, Key, Url
from corral.cli.common.output import DONE, as_plain_data, print_json, print_line, print_note
from corral.cli.common.roles import find_bus_server, settings_of
from corral.cli.doctor.command import find_problems
from corral.client import Client, find_endpoint
from corral.client.contexts import choose_context
from corral.contract.codec import PROTOCOL
from corral.kit.errors import CorralError
from corral.kit.files import replace_file
from corral.kit.humanize import format_bytes
from corral.kit.process import lock_holder
from corral.kit.settings import read_settings, shown

app = declare.App()
ROLES = ("controller", "gateway", "worker")
_MAX_LOG_BYTES = 4 * 1024 * 1024  # of each file: its end
_MAX_OPERATIONS = 200
_MAX_REQUESTS = 500


@app.command("support-bundle")
def support_bundle(
    command_context: declare.Context,
    file: Annotated[str, declare.Argument(metavar="FILE", help="archive to write (.tar.gz)")],
    overwrite: Overwrite = False,
    data: Data = None,
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    ca: Ca = None,
    context: Context = None,
) -> int:
    """Write logs, settings and checks into an archive, without secrets.

    It contains the logs of the processes of this machine, their settings, versions, the result of `corral doctor`, and
    lists of nodes, models, operations and failed requests. Keys, tokens and passwords are replaced by stars. It does
    not contain prompts, answers and the logs of backends.

    Read it before you send it: names of machines, users and models are in it.

    \b
    Examples:
      corral support-bundle corral-support.tar.gz
      tar -tzf corral-support.tar.gz
    """
    context = context or command_context.find_root().params.get("fleet")
    folder = chosen_folder(data, context)
    target = check_target(file, overwrite=overwrite)
    masker = Masker({*known_secrets(folder, os.environ), *([key] if key else [])})
    parts: dict[str, str] = {}
    for name, collect in _collectors(folder, {"url": url, "key": key, "ca": ca, "context": context}).items():
        try:
            found = collect()
        except (CorralError, OSError, sqlite3.Error, psutil.Error) as error:
            found = {f"{name}-error.txt": f"{type(error).__name__}: {error}\n"}
        parts.update({inner: masker.mask(text) for inner, text in found.items()})
    with explain_os_errors(target):
        replace_file(target, lambda opened: _write(opened, parts))
    size = target.stat().st_size
    if as_json:
        print_json({"file": str(target), "size_bytes": size, "contents": list(parts)})
        return DONE
    print_line(f"Wrote {target} ({format_bytes(size)}): {len(parts)} files, without secrets.")
    print_note("Read it before you send it: names of machines, users and models are in it.")
    return DONE


def _collectors(folder: DataFolder, connection: Mapping[str, str | None]) -> dict[str, Callable[[], dict[str, str]]]:
    return {
        "about": lambda: {"about.json": _json(_about(folder))},
        "settings": lambda: {"settings.json": _json(_settings(folder))},
        "doctor": lambda: {"doctor.json": _json(_doctor(folder, connection))},
        "fleet": lambda: asyncio.run(_fleet(connection)),
        "logs": lambda: dict(_logs(folder)),
    }


def _about(folder: DataFolder) -> dict[str, Any]:
    about: dict[str, Any] = {
        "created_at": datetime.now(UTC).isoformat(),
        "corral": __version__,
        "protocol": PROTOCOL,
        "python": sys.version,
        "platform": platform.platform(),
        "libraries": " ".join(platform.libc_ver()),
        "sqlite": sqlite3.sqlite_version,
        "openssl": ssl.OPENSSL_VERSION,
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load": os.getloadavg(),
        "data": str(folder.root),
        "packages": sorted(f"{each.name} {each.version}" for each in metadata.distributions()),
    }
    if folder.root.is_dir():
        about["disk_free_bytes"] = shutil.disk_usage(folder.root).free
        about["files"] = [
            f"{path.name} {path.stat().st_mode & 0o7777:o} {path.stat().st_size}"
            for path in sorted(folder.root.iterdir())
        ]
    try:
        about["bus_server"] = find_bus_server()
    except CorralError as error:
        about["bus_server"] = error.message
    return about


def _settings(folder: DataFolder) -> dict[str, Any]:
    """The settings of each process as it runs, else as it would start from here."""
    running = _running(folder)
    found: dict[str, Any] = {}
    for role in ROLES:
        env = running.get(role, os.environ)
        try:
            settings = shown(read_settings(settings_of(role), flags={}, env=env))
        except CorralError as error:
            settings = {"error": error.message}
        found[role] = {"source": "running process" if role in running else "this command", "settings": settings}
    return found


def _running(folder: DataFolder) -> dict[str, dict[str, str]]:
    """The environments of the processes that `corral up` started in this folder; it passes all settings there."""
    pid = lock_holder(folder.lock)
    found: dict[str, dict[str, str]] = {}
    if pid:
        for child in psutil.Process(pid).children():
            words = child.cmdline()
            if words and words[-1] in ROLES:
                found[words[-1]] = child.environ()
    return found


def _doctor(folder: DataFolder, connection: Mapping[str, str | None]) -> list[dict[str, str]]:
    choice = choose_context(os.environ, connection["context"])
    local = choice.context.fleet if choice else None
    return [each.as_data() for each in find_problems(folder, local, **connection)]


async def _fleet(connection: Mapping[str, str | None]) -> dict[str, str]:
    async with Client(find_endpoint(**connection, env=os.environ), timeout_s=10.0) as client:
        operations = await client.operations.list(everything=True, rows=False)
        models = [as_plain_data(each) for each in await client.models.list()]
        return {
            "fleet/nodes.json": _json(as_plain_data(await client.nodes.list())),
            "fleet/models.json": _json([{**each, "definition": "left out"} for each in models]),
            "fleet/operations.json": _json(as_plain_data(operations[:_MAX_OPERATIONS])),
            "fleet/failed-requests.json": _json(
                as_plain_data(await client.requests.list(limit=_MAX_REQUESTS, failed=True))
            ),
        }


def _logs(folder: DataFolder) -> Iterator[tuple[str, str]]:
    if not folder.logs.is_dir():
        raise FileNotFoundError(f"there is no folder {folder.logs}: logs of services are where the system keeps them")
    for path in sorted(folder.logs.iterdir()):
        if path.is_file() and ".log" in path.name:
            yield f"logs/{path.name}", _end_of(path)


def _end_of(path: Path) -> str:
    """The last lines, and no part of a line: a secret that is cut in two would not be found."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _MAX_LOG_BYTES))
        if size > _MAX_LOG_BYTES:
            file.readline()
        return file.read().decode(errors="replace")


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"


def _write(file: IO[bytes], parts: Mapping[str, str]) -> None:
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, text in parts.items():
            data = text.encode(errors="replace")
            entry = tarfile.TarInfo(f"corral-support/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(datetime.now(UTC).timestamp())
            tar.addfile(entry, io.BytesIO(data))
