"""Which ports a fleet uses. A port a person named is used or refused; one nobody named may move when it is taken.

What was used last is remembered, so that the workers that joined find the bus where it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from corral.cli.folder import DataFolder
from corral.cli.up import machine
from corral.cli.up.settings import UpSettings
from corral.kit.errors import Failed
from corral.kit.files import write_atomically

_USUAL = {"--bus-port": 4222, "--blob-port": 8090, "--ingress-port": 50050}


def choose_ports(
    settings: UpSettings, bind: str, *, remembered: Mapping[str, int], listening: int = 0
) -> dict[str, int]:
    """By flag. `listening`: the public port, where a socket on it was handed to us. Raises `Failed` with the line that
    names a port that was asked for and cannot be had."""
    asked: dict[str, int | None] = {
        "--port": settings.port,
        "--bus-port": settings.bus_port,
        "--blob-port": settings.blob_port,
    }
    if settings.worker:
        asked["--ingress-port"] = settings.ingress_port
    chosen: dict[str, int] = {}
    if listening:
        chosen["--port"] = listening
        del asked["--port"]
    for flag, port in asked.items():
        if port:
            machine.check_port(bind, port, flag)
            chosen[flag] = port
    for flag, port in asked.items():
        if not port:
            wishes = [] if port == 0 else [remembered.get(flag, 0), _USUAL[flag]]
            chosen[flag] = _first_free(bind, wishes, flag, chosen) or machine.free_port(bind, chosen.values())
    return chosen


def _first_free(bind: str, wishes: list[int], flag: str, chosen: Mapping[str, int]) -> int:
    for port in wishes:
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
        return {}  # nothing is lost: the usual ports are tried, then free ones


def remember_ports(folder: DataFolder, ports: Mapping[str, int]) -> None:
    try:
        write_atomically(folder.ports, msgspec.json.encode(dict(ports)))
    except OSError as error:
        raise Failed(f"cannot write {folder.ports}: {error.strerror}; make room or mend its permissions") from error
