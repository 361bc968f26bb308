"""Chooses the ports of a fleet. A port that the user gave is used or refused; another replaces a taken default port.

The chosen ports are saved, so that joined workers find the bus on the same port after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from corral.cli.common.data_folder import DataFolder
from corral.cli.up import machine
from corral.cli.up.settings import UpSettings
from corral.kit.errors import Failed
from corral.kit.files import write_atomically

_DEFAULTS = {"--bus-port": 4222, "--blob-port": 8090, "--ingress-port": 50050}


def choose_ports(
    settings: UpSettings, bind: str, *, remembered: Mapping[str, int], inherited_port: int = 0
) -> dict[str, int]:
    """The ports by flag. `inherited_port`: the public port, if a socket for it was inherited. Raises `Failed` if a port
    that the user gave cannot be used."""
    requested: dict[str, int | None] = {
        "--port": settings.port,
        "--bus-port": settings.bus_port,
        "--blob-port": settings.blob_port,
    }
    if settings.worker:
        requested["--ingress-port"] = settings.ingress_port
    chosen: dict[str, int] = {}
    if inherited_port:
        chosen["--port"] = inherited_port
        del requested["--port"]
    for flag, port in requested.items():
        if port:
            machine.check_port(bind, port, flag)
            chosen[flag] = port
    for flag, port in requested.items():
        if not port:
            preferred = [] if port == 0 else [remembered.get(flag, 0), _DEFAULTS[flag]]
            chosen[flag] = _first_free(bind, preferred, flag, chosen) or machine.free_port(bind, chosen.values())
    return chosen


def _first_free(bind: str, preferred: list[int], flag: str, chosen: Mapping[str, int]) -> int:
    for port in preferred:
        if port and port not in chosen.values():
            try:
                machine.check_port(bind, port, flag)
            except Failed:
                continue
            return port
    return 0


def read_ports(folder: DataFolder) -> dict[str, int]:
    try:
        return msgspec.json.decode(folder.ports.read_bytes(), type=dict[str, int])
    except (OSError, msgspec.DecodeError):
        return {}  # the default ports are tried, then free ones


def save_ports(folder: DataFolder, ports: Mapping[str, int]) -> None:
    try:
        write_atomically(folder.ports, msgspec.json.encode(dict(ports)))
    except OSError as error:
        raise Failed(
            f"cannot write {folder.ports}: {error.strerror}; free some space, or correct its permissions"
        ) from error
