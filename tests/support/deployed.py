"""What the files in deploy/ say of a container, compared with the settings, commands and routes of the code."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import click

from corral.cli.nodes.bus_server import BusRoleSettings
from corral.cli.run import root
from corral.cli.service.units import CAPABILITIES, STOP_S
from corral.controller.settings import ControllerSettings
from corral.gateway.settings import GatewaySettings
from corral.kit.settings import describe, read_settings
from corral.worker.settings import WorkerSettings

SETTINGS: dict[str, type[Any]] = {
    "controller": ControllerSettings,
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
    "bus": BusRoleSettings,
}
OF_THE_CLI = {"CORRAL_URL", "CORRAL_KEY_FILE", "CORRAL_CA"}  # for commands that people run in a container
WORKER_CAPABILITIES = sorted(name.removeprefix("CAP_") for name in CAPABILITIES.split())
PROBES = {"/healthz", "/readyz"}
_PATHS = re.compile(r"/(secrets|gateway|tls|ca)(/\S*)?")


def parse_command(words: Sequence[str]) -> None:
    """Fails where `corral WORDS` is wrong usage."""
    command: click.Command = root()
    left = list(words)
    context = click.Context(command, info_name="corral")
    while isinstance(command, click.Group):
        name, found, left = command.resolve_command(context, left)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.parse_args(context, left)


def unknown_variables(role: str, names: Collection[str]) -> set[str]:
    """Variables of ours that the role does not read. The image sets one of workers for all roles."""
    known = {doc.env for doc in describe(SETTINGS[role])} | OF_THE_CLI
    return {name for name in names if name.startswith("CORRAL_")} - known


def read_role(role: str, env: Mapping[str, str]) -> Any:
    """The settings that the role starts with. Raises `BadSettings`."""
    return read_settings(SETTINGS[role], flags={}, env=env)


def stop_s(role: str) -> int:
    return STOP_S.get(role, 10)


def hosts_in(env: Mapping[str, str]) -> set[tuple[str, str, int]]:
    """Scheme, host and port of each URL."""
    found = set()
    for value in env.values():
        parts = urlsplit(value)
        if parts.scheme in ("http", "https", "tls", "nats") and parts.hostname:
            found.add((parts.scheme, parts.hostname, parts.port or 0))
    return found


def secret_paths(env: Mapping[str, str]) -> set[str]:
    return {value for value in env.values() if _PATHS.fullmatch(value)}
