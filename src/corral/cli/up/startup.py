"""Starts the processes in order, waits until the fleet is ready, and prints its address and the join command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TextIO, TypeVar

from corral.cli.common.output import print_line
from corral.cli.nodes.tokens import join_line
from corral.cli.up.children import ChildSpec, Site
from corral.cli.up.settings import UpSettings
from corral.cli.up.supervisor import Supervisor
from corral.client import Client, Endpoint, LocalFleet
from corral.client.contexts import choose_context, claim_context
from corral.client.endpoint import read_key
from corral.contract.admin import CreateJoinToken, JoinTokenCreated
from corral.kit.errors import CorralError, Failed, OutcomeUnknown, Unavailable, Unreachable
from corral.kit.files import write_secret

T = TypeVar("T")
FLEET = ("bus", "controller", "gateway")
_WORKER_TOKEN_TTL_S = 900.0
_POLL_S = 0.1
_READY_TIMEOUT_S = 2.0
_RETRY_S = 0.5
_WORKER = "the worker of this machine"
READY = "Corral is ready."
_MAX_FAILED_STARTS = 3  # in a row, before the fleet was ever ready


class FleetStartup:
    def __init__(
        self,
        settings: UpSettings,
        site: Site,
        specs: Mapping[str, ChildSpec],
        supervisor: Supervisor,
        report: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._site = site
        self._specs = specs
        self._supervisor = supervisor
        self._report = report
        self._endpoint = Endpoint(
            site.local_url, read_key(site.folder.admin_key), str(site.folder.ca_cert) if site.tls else ""
        )

    async def run(self) -> None:
        for name in FLEET:
            self._supervisor.start(self._specs[name])
        async with Client(self._endpoint, timeout_s=10.0) as client:
            await self._wait_for_fleet(client)
            self._write_context()
            if "worker" in self._specs:
                await self._start_with_worker(client)
            else:
                await self._print_ready_message(client, is_ready=True)

    async def list_open_operations(self) -> list[tuple[str, str]]:
        """Kind and id of each."""
        async with Client(self._endpoint, timeout_s=10.0) as client:
            return [(each.kind, each.job_id) for each in await client.operations.list(rows=False)]

    async def _start_with_worker(self, client: Client) -> None:
        """Create a join token for the worker of this machine, start the worker, and revoke the token afterwards. A slow
        worker does not delay the message with the address, but "ready" is printed only when the worker is ready."""
        body = CreateJoinToken(name="this machine's worker", ttl_s=_WORKER_TOKEN_TTL_S, pre_approved=True)
        made = await retry_until_available(lambda: client.tokens.create(body))
        write_secret(self._site.folder.worker_token, made.secret + "\n")
        self._supervisor.start(self._specs["worker"])
        ingress = Endpoint(self._site.ingress_url, "", self._endpoint.ca, any_name=True)
        async with Client(ingress, timeout_s=5.0) as worker:
            is_ready = await self._wait_until_ready(_WORKER, worker)
            await self._print_ready_message(client, is_ready=is_ready)
            while not is_ready:
                await asyncio.sleep(_RETRY_S)
                if is_ready := await self._not_ready_reason(worker) is None:
                    _print(READY)
        await retry_until_available(lambda: client.tokens.revoke(made.token.id))

    async def _not_ready_reason(self, client: Client) -> str | None:
        """None when the service is ready, else the reason why it is not."""
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):  # while the gateway starts, connections wait in the backlog
                status, body = await client.status_of("/readyz")
        except TimeoutError:
            return "no answer yet"
        except CorralError as error:
            return error.message
        return None if status == 200 else body.decode("utf-8", errors="replace").strip()[:200] or f"HTTP {status}"

    async def _wait_for_fleet(self, client: Client) -> None:
        """Wait without limit, with a message after each timeout. Only a process that cannot start ends the wait."""
        while not await self._wait_until_ready("the fleet", client):
            for name in FLEET:
                if self._supervisor.children[name].failed_starts >= _MAX_FAILED_STARTS:
                    raise Failed(f"the {name} cannot start: {_last(self._supervisor.children[name].last_lines)}")

    async def _wait_until_ready(self, what: str, client: Client) -> bool:
        """True if the service is ready. False after the timeout, which is reported, or if a process keeps ending."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.ready_timeout_s
        while (reason := await self._not_ready_reason(client)) is not None:
            if any(child.failed_starts >= _MAX_FAILED_STARTS for child in self._supervisor.children.values()):
                return False
            if loop.time() > end:
                self._report(f"{what} is not ready yet: {reason} (still waiting; logs: {self._site.folder.logs})")
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _write_context(self) -> None:
        folder = self._site.folder
        fleet = LocalFleet(
            url=self._endpoint.url,
            public_url=self._site.public_url,
            data=str(folder.root),
            admin_key_file=str(folder.admin_key),
            ca_file=self._endpoint.ca,
            bus_url=self._site.bus_url,
            pid=os.getpid(),
            started_at=time.time(),
        )
        try:
            context = claim_context(os.environ, fleet, self._settings.context)
        except OSError as error:  # a read-only home folder does not stop the fleet
            self._report(
                f"cannot write {error.filename} ({error.strerror}): give --url and --key to commands on this machine"
            )
            return
        chosen = choose_context({**os.environ, "CORRAL_CONTEXT": ""})
        if chosen is not None and chosen.context.name != context.name:
            self._report(
                f"commands use the fleet {chosen.context}, which started earlier: use this one with "
                f"`--context {context.name}`, or make it the default: `corral contexts use {context.name}`"
            )

    async def _print_ready_message(self, client: Client, *, is_ready: bool) -> None:
        # A journal keeps what is printed, and others may read it: a service prints no token.
        join_command = "" if is_journal(os.environ, sys.stdout) else await self._make_join_command(client)
        for line in ready_message(
            self._site,
            join_command=join_command,
            key=self._endpoint.key if self._settings.show_key or sys.stdout.isatty() else None,
            is_ready=is_ready,
        ):
            _print(line)

    async def _make_join_command(self, client: Client) -> str:
        body = CreateJoinToken(name="join line of corral up", url=self._site.public_url)
        made: JoinTokenCreated = await retry_until_available(lambda: client.tokens.create(body))
        # Another worker of this machine needs no installation.
        installing = made.install_command if self._site.lan else ""
        return installing or made.join_command or join_line(self._public_endpoint(), made.secret)

    def _public_endpoint(self) -> Endpoint:
        return Endpoint(self._site.public_url, "", self._endpoint.ca)


async def retry_until_available(call: Callable[[], Awaitable[T]], *, every_s: float = _RETRY_S) -> T:
    """Repeat a call until a process that is restarting answers. The supervisor reports processes that cannot start. The
    calls are safe to repeat."""
    while True:
        try:
            return await call()
        except (Unavailable, Unreachable, OutcomeUnknown):
            await asyncio.sleep(every_s)


def is_journal(env: Mapping[str, str], stream: TextIO) -> bool:
    """Whether systemd connected this stream to its journal: it then names device and inode of it."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file
        return False
    return env.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def ready_message(site: Site, *, join_command: str, key: str | None, is_ready: bool = True) -> list[str]:
    """The lines that `corral up` prints when the fleet runs. `join_command`: empty for a service. Pure."""
    url = site.public_url if site.lan else site.local_url
    lines = [
        READY if is_ready else f"Corral is running, but {_WORKER} is not ready yet.",
        "",
        f"  URL        {url}/v1",
        f"  web page   {url}/",
        f"  admin key  {key or site.folder.admin_key}",
        f"  logs       {site.folder.logs}",
    ]
    if not join_command:
        return [*lines, "", "To join another machine: `corral token create`"]
    return [
        *lines,
        "",
        "To join another machine, run there:"
        if site.lan
        else "To join another worker on this machine, run (other machines need `corral up --lan`):",
        "",
        f"  {join_command}",
        "",
        "The join command is valid once, for one hour. Then admit the machine: `corral nodes approve NAME`",
        "Ctrl-C stops the fleet.",
    ]


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal does not stop the fleet
        print_line(line)


def _last(lines: list[str]) -> str:
    return lines[-1] if lines else "it wrote no output; see its log"
