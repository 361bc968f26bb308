"""From nothing to a fleet that answers: start in order, wait until each can do its work, say where it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from corral.cli.output import tell as print_line
from corral.cli.tokens import join_line
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
_OWN_TOKEN_LIFE_S = 900.0
_LOOK_EVERY_S = 0.1
_LOOK_WITHIN_S = 2.0
_TRY_EVERY_S = 0.5
_OWN_WORKER = "this machine's worker"
READY = "Corral is ready."
_HOPELESS_AFTER = 3  # ends in a row, before the fleet was ever ready


class BringUp:
    def __init__(
        self,
        settings: UpSettings,
        site: Site,
        specs: Mapping[str, ChildSpec],
        supervisor: Supervisor,
        tell: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._site = site
        self._specs = specs
        self._supervisor = supervisor
        self._tell = tell
        self._endpoint = Endpoint(
            site.local_url, read_key(site.folder.admin_key), str(site.folder.ca_cert) if site.tls else ""
        )

    async def run(self) -> None:
        for name in FLEET:
            self._supervisor.start(self._specs[name])
        async with Client(self._endpoint, timeout_s=10.0) as client:
            await self._until_fleet_answers(client)
            self._announce_locally()
            if "worker" in self._specs:
                await self._start_with_worker(client)
            else:
                await self._greet(client, is_ready=True)

    async def _start_with_worker(self, client: Client) -> None:
        """Its token is made here and now, for this machine alone, and taken back once it is not needed any more. A
        worker that is late does not keep the others from using the fleet, but the fleet is called ready only when it
        is."""
        wanted = CreateJoinToken(name="this machine's worker", ttl_s=_OWN_TOKEN_LIFE_S, pre_approved=True)
        made = await insist(lambda: client.tokens.create(wanted))
        write_secret(self._site.folder.worker_token, made.secret + "\n")
        self._supervisor.start(self._specs["worker"])
        ingress = Endpoint(self._site.ingress_url, "", self._endpoint.ca, any_name=True)
        async with Client(ingress, timeout_s=5.0) as worker:
            is_ready = await self._within_patience(_OWN_WORKER, worker)
            await self._greet(client, is_ready=is_ready)
            while not is_ready:
                await asyncio.sleep(_TRY_EVERY_S)
                if is_ready := await self._missing(worker) is None:
                    _print(READY)
        await insist(lambda: client.tokens.revoke(made.token.id))

    async def _missing(self, client: Client) -> str | None:
        """None when it is ready, else why it is not."""
        try:
            async with asyncio.timeout(_LOOK_WITHIN_S):  # while the gateway starts, connections wait in its backlog
                status, body = await client.status_of("/readyz")
        except TimeoutError:
            return "no answer yet"
        except CorralError as error:
            return error.message
        return None if status == 200 else body.decode("utf-8", errors="replace").strip()[:200] or f"HTTP {status}"

    async def _until_fleet_answers(self, client: Client) -> None:
        """For ever, but not in silence. Only a part that cannot even start ends the wait."""
        while not await self._within_patience("the fleet", client):
            for name in FLEET:
                if self._supervisor.children[name].quick_ends >= _HOPELESS_AFTER:
                    raise Failed(f"{name} cannot start: {_last(self._supervisor.children[name].last_words)}")

    async def _within_patience(self, what: str, client: Client) -> bool:
        """Whether it became ready. False after the timeout, which is told, or when a part keeps ending."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.ready_timeout_s
        while (missing := await self._missing(client)) is not None:
            if any(child.quick_ends >= _HOPELESS_AFTER for child in self._supervisor.children.values()):
                return False
            if loop.time() > end:
                self._tell(f"{what} is not ready yet: {missing} (still trying; logs in {self._site.folder.logs})")
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    def _announce_locally(self) -> None:
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
        except OSError as error:  # a read-only home is no reason to have no fleet
            self._tell(f"{error.filename} cannot be written ({error.strerror}): give commands --url and --key")
            return
        chosen = choose_context({**os.environ, "CORRAL_CONTEXT": ""})
        if chosen is not None and chosen.context.name != context.name:
            self._tell(
                f"commands go to the fleet {chosen.context}, which runs already: reach this one with "
                f"`--context {context.name}` or after `corral contexts use {context.name}`"
            )

    async def _greet(self, client: Client, *, is_ready: bool) -> None:
        wanted = CreateJoinToken(name="join line of corral up")
        made: JoinTokenCreated = await insist(lambda: client.tokens.create(wanted))
        for line in greeting(
            self._site,
            join_command=made.join_command or join_line(self._public_endpoint(), made.secret),
            key=self._endpoint.key if self._settings.show_key or sys.stdout.isatty() else None,
            is_ready=is_ready,
        ):
            _print(line)

    def _public_endpoint(self) -> Endpoint:
        return Endpoint(self._site.public_url, "", self._endpoint.ca)


async def insist(ask: Callable[[], Awaitable[T]], *, every_s: float = _TRY_EVERY_S) -> T:
    """A part that is just being restarted is no reason to give up, however long that takes: whether it can ever start
    is the supervisor's to see, and told by it. Doing these calls twice does no harm."""
    while True:
        try:
            return await ask()
        except (Unavailable, Unreachable, OutcomeUnknown):
            await asyncio.sleep(every_s)


def greeting(site: Site, *, join_command: str, key: str | None, is_ready: bool = True) -> list[str]:
    """What a person sees when everything runs. Pure."""
    url = site.public_url if site.lan else site.local_url
    return [
        READY if is_ready else f"Corral runs, but {_OWN_WORKER} is not ready yet.",
        "",
        f"  URL        {url}/v1",
        f"  page       {url}/",
        f"  admin key  {key or site.folder.admin_key}",
        f"  logs       {site.folder.logs}",
        "",
        "Another machine joins with"
        if site.lan
        else "Another worker on this machine joins with (other machines: --lan)",
        "",
        f"  {join_command}",
        "",
        "That line is good once, for an hour; then let the machine in with `corral nodes approve NAME`.",
        "Ctrl-C stops everything.",
    ]


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it: no reason to stop
        print_line(line)


def _last(lines: list[str]) -> str:
    return lines[-1] if lines else "it said nothing"
