"""Checks that the default ports are free or used by a Corral fleet; another program on them is a warning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from corral.cli.common.data_folder import DataFolder
from corral.cli.common.port_owners import BUS, INGRESS, PUBLIC, Owner, find_owner
from corral.cli.doctor.findings import Finding, ok, warn
from corral.cli.up import machine
from corral.cli.up.ports import read_ports
from corral.client.contexts import Context, list_contexts
from corral.kit.errors import CorralError
from corral.kit.process import lock_holder

DEFAULT_PORTS = ((8080, PUBLIC), (4222, BUS), (50050, INGRESS))


def check_ports(
    folder: DataFolder, env: Mapping[str, str], ports: tuple[tuple[int, str], ...] = DEFAULT_PORTS
) -> Iterator[Finding]:
    """Check the ports while no fleet runs in this folder. Each must be free or used by another Corral fleet: one with a
    context, one of another user, a role that was started alone, a worker of another fleet."""
    holder = lock_holder(folder.lock)
    if holder is not None:
        yield ok("running", f"`corral up` runs with this data folder (pid {holder or 'unknown'})")
        return
    for port, flag in ports:
        try:
            machine.check_port("127.0.0.1", port, flag)
        except CorralError as error:
            yield _taken(port, flag, error.message, env)
        else:
            yield ok("port", f"{port} is free")


def _taken(port: int, flag: str, message: str, env: Mapping[str, str]) -> Finding:
    owner = _context_with(port, env) or find_owner(port, flag)
    if owner is not None and owner.is_ours:
        return ok("port", f"{port} is used by {owner.words}")
    seen, _, fix = message.partition(": ")
    return warn("port", seen, fix)


def _context_with(port: int, env: Mapping[str, str]) -> Owner | None:
    for context in list_contexts(env):
        if context.is_live and port in _ports_of(context):
            return Owner(f"the fleet of context {context.name!r}", is_ours=True)
    return None


def _ports_of(context: Context) -> frozenset[int]:
    urls = (context.fleet.url, context.fleet.public_url, context.fleet.bus_url)
    named = [urlsplit(url).port for url in urls if url]
    used = read_ports(DataFolder(Path(context.fleet.data)))
    return frozenset(port for port in (*named, *used.values()) if port)
