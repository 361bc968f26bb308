"""What `corral join` prints: connecting, waiting for approval, approved, ready; and which port is blocked.

The decisions are pure; `report` reads the status of the worker in this process."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from corral.cli.common.output import print_line, printable

BUS_PATIENCE_S = 5.0  # a bus is usually there at once
_LOOK_S = 0.1


class Status(Protocol):
    """Of a worker (`corral.worker.status`)."""

    name: str
    controller: str
    status: str
    bus_urls: tuple[str, ...]
    ingress_url: str
    is_ingress_ok: bool | None
    ingress_error: str

    def not_ready_reason(self) -> str | None: ...


@dataclass
class JoinProgress:
    """Turns states of the worker into lines; each is printed once."""

    _said: set[str] = field(default_factory=set)
    _bus_down_since: float | None = None
    _was_blocked: bool = False

    def lines(self, status: Status, now: float) -> Iterator[str]:
        if not status.status:
            yield from self._once("connect", f"Connecting to {status.controller}")
            return
        if status.status == "pending":
            command = f"corral nodes approve {shlex.quote(status.name)}"
            yield from self._once(f"wait {status.name}", f"Waiting for approval: run `{command}` on the fleet")
            return
        yield from self._once("approved", f"Approved as {status.name}")
        reason = status.not_ready_reason()
        if reason is None:
            self._bus_down_since = None
            yield from self._once("ready", "Ready. Ctrl-C stops the worker; `corral worker` starts it again")
            yield from self._ingress(status)
        elif status.bus_urls:
            yield from self._bus(status, now)

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to be reported: the node is ready, and the fleet has reached it."""
        return "reached" in self._said

    def _bus(self, status: Status, now: float) -> Iterator[str]:
        self._bus_down_since = now if self._bus_down_since is None else self._bus_down_since
        if now - self._bus_down_since < BUS_PATIENCE_S:
            return
        host, port = _address(status.bus_urls[0], 4222)
        yield from self._once(
            "bus",
            f"The fleet answers, but not its bus, {host} port {port}: open TCP port {port} on {host} "
            f"({firewall_commands(port)}). Trying again",
        )

    def _ingress(self, status: Status) -> Iterator[str]:
        if status.is_ingress_ok is None and status.ingress_error == "":
            return
        if status.ingress_error:
            _, port = _address(status.ingress_url, 50050)
            self._was_blocked = True
            yield from self._once(
                "ingress",
                f"The fleet cannot reach this machine at {status.ingress_url}: open TCP port {port} here "
                f"({firewall_commands(port)}), or give the address that it can reach with --advertise",
            )
        elif "reached" not in self._said:
            self._said.add("reached")
            if self._was_blocked:
                yield f"The fleet reaches this machine at {status.ingress_url} now"

    def _once(self, key: str, line: str) -> Iterator[str]:
        if key not in self._said:
            self._said.add(key)
            yield line


def firewall_commands(port: int) -> str:
    """How people open a port, for the two usual firewalls."""
    return f"`sudo ufw allow {port}/tcp` or `sudo firewall-cmd --add-port={port}/tcp`"


async def report(status: Status, print_: Callable[[str], None] = print_line) -> None:
    """Print the lines until all is well, then let warnings through."""
    progress = JoinProgress()
    while not progress.is_done:
        for line in progress.lines(status, time.monotonic()):
            print_(printable(line))
        await asyncio.sleep(_LOOK_S)
    root = logging.getLogger()
    root.setLevel(min(root.level, logging.WARNING))


def _address(url: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or url, parts.port or default_port
