"""Installs a service: finds the program, checks the settings, writes the files and starts it."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from corral.cli.common.roles import save_worker_settings, settings_of
from corral.cli.service.managers import Files, Manager, make_users, write_files
from corral.cli.service.service import ROLES, Service, parse_settings, read_assignments, settings_text
from corral.client.contexts import config_folder
from corral.kit.errors import Failed, Invalid
from corral.kit.files import make_private_folder, write_atomically, write_secret
from corral.kit.process import HOME_DATA, resolve_data
from corral.kit.settings import describe, read_settings

_ETC = Path("/etc/corral")
_UVX = "archive-v0"  # where uv keeps environments that it may remove at any time
_IDENTITY = "identity.json"  # of a worker that has begun to join
TOKEN_FILE = "join.token"


def find_service(role: str, data: str | None = None) -> Service:
    """The service of this role, for root one of the system. Raises Invalid for an unknown role."""
    if role not in ROLES:
        raise Invalid(f"no service {role!r}: the services are {', '.join(ROLES)}")
    is_system = os.geteuid() == 0
    config = config_folder(os.environ)
    env_file = (_ETC if is_system else config) / f"{role}.env"
    return Service(
        role=role,
        program=find_program(),
        data=Path(data).expanduser().absolute() if data else _default_data(role),
        home=Path(pwd.getpwuid(os.geteuid()).pw_dir) if is_system else Path.home(),
        config=config,
        env_file=env_file,
        is_system=is_system,
        settings=parse_settings(_read(env_file)),
    )


def find_program() -> Path:
    """The command `corral`, by a path that an upgrade does not change."""
    prefix = Path(sys.prefix)
    current = prefix.parent.parent / "current"  # of the installer of joining machines
    if current.is_symlink() and current.exists() and current.samefile(prefix):
        return current / "bin" / "corral"
    return prefix / "bin" / "corral"


def plan_install(service: Service, words: list[str], address: str) -> tuple[Service, str]:
    """The service with the given settings, and the text of its file of settings. Raises Invalid and Failed."""
    if address and service.role not in ("up", "gateway"):
        raise Invalid(f"--socket is for up and gateway: {service.role} has no public port")
    if not service.program.exists() or _UVX in service.program.parts:
        raise Failed(f"{service.program} is no lasting installation: run `uv tool install WHEEL`, then this again")
    if service.user and (closed := first_closed(service.program)) is not None:
        raise Failed(
            f"the user {service.user} cannot enter {closed}, where Corral is installed: install it in an open folder, "
            "such as /opt/corral, and run this again with that `corral`"
        )
    changes = read_assignments(words, _known_variables(service.role))
    text = settings_text(_read(service.env_file), changes)
    planned = replace(service, settings=parse_settings(text), address=address)
    _check_settings(planned)
    return planned, text


def first_closed(path: Path) -> Path | None:
    """The first folder above this file, links followed, that other users cannot enter."""
    for each in (path.absolute(), path.resolve(), *_interpreter(path)):
        for folder in reversed(each.parents):
            if not folder.stat().st_mode & stat.S_IXOTH:
                return folder
    return None


def install(service: Service, text: str, manager: Manager, *, starts: bool) -> None:
    """Safe to run again: files are replaced, and a running service is restarted."""
    files: Files = manager.files(service)
    write_files(files)
    # The settings are for root; other files of the folder, such as keys, are for the user of the service.
    service.env_file.parent.mkdir(parents=True, exist_ok=True, mode=0o755 if service.is_system else 0o700)
    write_atomically(service.env_file, text.encode(), mode=0o600)
    if service.is_system and sys.platform == "linux":
        make_users(service.new_users)
    _make_data(service)
    if starts:
        manager.start(service)


def _make_data(service: Service) -> None:
    service.config.mkdir(parents=True, exist_ok=True)
    if service.role == "gateway":
        return
    service.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    if service.user and sys.platform == "linux":
        owner = pwd.getpwnam(service.user)
        if service.data.stat().st_uid != owner.pw_uid:
            if any(service.data.iterdir()):
                command = f"chown -R {service.user}: {shlex.quote(str(service.data))}"
                raise Failed(f"{service.data} belongs to another user than {service.user}: run `{command}`")
            shutil.chown(service.data, owner.pw_uid, owner.pw_gid)


def _check_settings(service: Service) -> None:
    """Faults are named now, not in a log that nobody reads."""
    given = {**service.settings, **service.environment}
    read_settings(settings_of(service.role), flags={}, env=given)
    if service.role == "worker" and not (service.data / _IDENTITY).exists() and not given.get("CORRAL_CONTROLLER"):
        raise Failed(
            f"no worker has joined a fleet with {service.data}: run `corral join URL --token TOKEN --service` "
            "(`corral token create` prints URL and token), or give the folder with --data"
        )


def _known_variables(role: str) -> frozenset[str]:
    """`corral up` hands the settings of the others on to them."""
    known = {doc.env for each in (ROLES if role == "up" else (role,)) for doc in describe(settings_of(each))}
    return frozenset(known - {"CORRAL_DATA"} | {"CORRAL_CONFIG"})  # the data folder has an option


def _default_data(role: str) -> Path:
    if chosen := os.environ.get("CORRAL_DATA"):
        return Path(chosen).expanduser().absolute()
    return resolve_data(HOME_DATA if role == "up" else HOME_DATA / role)


def _interpreter(program: Path) -> Iterator[Path]:
    python = program.parent / "python"
    if python.exists():
        yield python.resolve()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def join_service(settings: Any, flags: dict[str, Any]) -> tuple[Service, str]:
    """The service of a worker that joins: it needs the token once, and the other options at every start."""
    node = settings.node
    service = find_service("worker", str(node.data))
    words = [f"CORRAL_CONTROLLER={node.controller}"] if node.controller else []
    if node.ca:
        words.append(f"CORRAL_CA={node.ca if node.ca.startswith('sha256:') else Path(node.ca).absolute()}")
    if flags.get("name"):
        words.append(f"CORRAL_NAME={node.name}")
    if node.token:
        words.append(f"CORRAL_TOKEN_FILE={service.data / TOKEN_FILE}")
    return plan_install(service, words, "")


def save_join(service: Service, settings: Any, flags: dict[str, Any]) -> None:
    make_private_folder(service.data)
    save_worker_settings(settings, flags)
    if settings.node.token:
        write_secret(service.data / TOKEN_FILE, settings.node.token + "\n")
