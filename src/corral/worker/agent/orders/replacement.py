"""Replaces the processes of a backend by processes of another version, without a gap
(docs/explanation/design.md#upgrades).

New processes start beside the old ones, which stop only when all new ones serve. If one fails to start, all new ones
stop and the old ones serve on. The installer decides which version on the disk is current.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from corral.contract.manifest import OPENAI
from corral.kit.errors import CorralError, Failed, NotFound
from corral.kit.log import get_log
from corral.worker.ingress.replicas import ReplicaRelay
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.supervisor.table import Running

log = get_log(__name__)
PROBE_S = 120.0
TRIES = 3
# Not a failure: the model cannot chat, or all slots are busy.
_HARMLESS_STATUSES = (501, 503)


@dataclass(frozen=True)
class Pair:
    old: str  # process ids
    new: str
    key: str


class ProcessReplacer:
    def __init__(
        self, supervisor: Supervisor, relay: ReplicaRelay, *, drain_s: float, probe_s: float = PROBE_S
    ) -> None:
        """`drain_s` limits how long requests to an old process may take to end, `probe_s` how long a new process may
        take for its first request."""
        self._supervisor = supervisor
        self._relay = relay
        self._drain_s = drain_s
        self._probe_s = probe_s

    def users(self, backends: Collection[str]) -> dict[str, ProcessSpec]:
        """Processes of a backend that run or will be restarted, by process id."""
        return self._supervisor.specs_of(backends)

    async def start_beside(self, backends: Collection[str], build: InstalledBackend) -> list[Pair]:
        """Start a process of `build` for each process of another build. When one fails, the new processes stop, the old
        ones serve on, and the error (StartFailed, …) is raised."""
        pairs: list[Pair] = []
        try:
            for process_id, spec in self.users(backends).items():
                if spec.directory == str(build.directory):
                    continue
                wanted = successor(spec, build)
                # A worker that was killed in between may have left a new process running.
                new = self._find(wanted) or await self._supervisor.start(wanted, beside=True)
                await probe_once(new, self._probe_s)
                pairs.append(Pair(process_id, new.process_id, spec.key))
            if gone := [pair for pair in pairs if self._supervisor.find(pair.new) is None]:
                raise Failed(f"the new process of {gone[0].key} ended before it could take over")
        except BaseException:
            await self.cancel(backends, build)
            raise
        return pairs

    async def cancel(self, backends: Collection[str], build: InstalledBackend) -> None:
        """Stop the processes of the new build that run, or start, beside an old one."""
        specs = self.users(backends)
        old = {spec.key for spec in specs.values() if spec.directory != str(build.directory)}
        new = [
            process_id
            for process_id, spec in specs.items()
            if spec.key in old and spec.directory == str(build.directory)
        ]
        await asyncio.gather(*(self._stop(process_id, force=True) for process_id in new))

    async def retire(self, pairs: list[Pair]) -> None:
        """The new processes have taken over: stop the old ones when their requests have ended."""
        await asyncio.gather(*(self._retire(pair) for pair in pairs))

    async def catch_up(self, backends: Collection[str], build: InstalledBackend) -> None:
        """After the switch, replace processes of the old version that started, or restarted, in the meantime."""
        try:
            await self.retire(await self.start_beside(backends, build))
        except CorralError as error:
            log.error("a process of the old version stays", backend=build.name, reason=error.message)

    async def _retire(self, pair: Pair) -> None:
        self._relay.redirect(pair.old, pair.new)
        await self._take_down(pair.old)
        log.info("process replaced", key=pair.key, old=pair.old, new=pair.new)

    async def _stop(self, process_id: str, *, force: bool = False) -> None:
        try:
            stopped = await self._supervisor.stop(process_id, force=force)
        except NotFound:
            return
        except CorralError as error:
            log.error("a process could not be stopped", process=process_id, reason=error.message)
            return
        if not stopped.terminated:
            log.error("a process could not be stopped", process=process_id, reason=stopped.error)

    def _find(self, wanted: ProcessSpec) -> Running | None:
        running = self._supervisor.find_key(wanted.key)
        return running if running is not None and running.directory == wanted.directory else None

    # For machines whose memory cannot hold both versions

    async def take_down(self, backends: Collection[str], build: InstalledBackend) -> dict[str, ProcessSpec]:
        """Stop every process of another build when its requests have ended. Returns the specs to start them again, by
        process id."""
        down: dict[str, tuple[str, ProcessSpec]] = {}  # by key
        for _ in range(TRIES):  # a process that crashed in the meantime was restarted under another id
            users = self.users(backends)
            old = {each: spec for each, spec in users.items() if spec.directory != str(build.directory)}
            down |= {spec.key: (each, msgspec.structs.replace(spec, process_id="")) for each, spec in old.items()}
            await asyncio.gather(*(self._take_down(process_id) for process_id in old))
        return dict(down.values())

    async def bring_up(self, specs: Mapping[str, ProcessSpec]) -> None:
        """Start all of them, or none: the first failure stops the others and is raised. `specs`: by the id of the
        process that each one replaces."""
        started: dict[str, Running] = {}
        try:
            for old, spec in specs.items():
                started[old] = await self._supervisor.start(spec)
                await probe_once(started[old], self._probe_s)
        except BaseException:
            await asyncio.gather(*(self._stop(running.process_id, force=True) for running in started.values()))
            raise
        for old, running in started.items():
            self._relay.redirect(old, running.process_id)

    async def restore(self, specs: Mapping[str, ProcessSpec]) -> None:
        """Start the processes that ran before; failures are only logged."""
        for old, spec in specs.items():
            try:
                self._relay.redirect(old, (await self._supervisor.start(spec)).process_id)
            except CorralError as error:
                log.error("a process could not be restored", key=spec.key, reason=error.message)

    async def _take_down(self, process_id: str) -> None:
        if not await self._relay.retire(process_id, self._drain_s):
            log.warning("a process is stopped with requests in flight", process=process_id, waited_s=self._drain_s)
        await self._stop(process_id)

    async def stop_users(self, backends: Collection[str], keys: Collection[str] = (), *, force: bool) -> list[str]:
        """Stop every process of a backend and those with these keys. Returns the keys of the stopped processes; raises
        `StillRunning` if one survives."""
        stopped = await self._supervisor.stop_backend(backends, force=force)
        for key in keys:
            stopped += await self._supervisor.stop_key(key, force=force)
        if left := [each for each in stopped if not each.terminated]:
            raise StillRunning([each.key for each in stopped if each.terminated], left[0].key, left[0].error)
        return list(dict.fromkeys(each.key for each in stopped))

    async def keep_one_each(self, current: Collection[str]) -> None:
        """After a start: a worker that was killed while it replaced a process left two under one key. The process of a
        current version stays; `current` has the folders of current versions."""
        by_key: dict[str, list[tuple[str, str]]] = {}
        for running in self._supervisor.serving():
            by_key.setdefault(running.key, []).append((running.process_id, running.directory))
        for key, found in by_key.items():
            keep = next((each for each in found if each[1] in current), found[-1])
            for process_id, _ in found:
                if process_id != keep[0]:
                    log.warning("two processes under one key, one is stopped", key=key, process=process_id)
                    await self._stop(process_id)


class StillRunning(Failed):
    """A killed process still runs, so nothing changes on the disk. `stopped` are the keys of stopped processes."""

    def __init__(self, stopped: list[str], key: str, why: str) -> None:
        super().__init__(f"{key} could not be stopped: {why}")
        self.stopped = stopped


def successor(spec: ProcessSpec, build: InstalledBackend) -> ProcessSpec:
    """The same process of another build. Pure."""
    return msgspec.structs.replace(
        spec, directory=str(build.directory), manifest=build.manifest, digest=build.digest, process_id=""
    )


async def probe_once(running: Running, timeout_s: float) -> None:
    """Send one request to a new process: some fail only at their first request. Raises Failed when the process breaks
    the connection, answers with a server error or not at all; other answers are fine, as not every model can chat. A
    gRPC process has answered LoadModel before, and a process without a model has no route to call."""
    if running.protocol != OPENAI or not running.model:
        return
    body = {"model": running.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {running.token}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.post(f"http://{running.address}/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            await answer.read()
            status = answer.status
    except TimeoutError as error:
        raise Failed(f"the new process of {running.key} did not answer within {timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise Failed(f"the new process of {running.key} broke the connection at its first request: {error}") from error
    if status >= 500 and status not in _HARMLESS_STATUSES:
        raise Failed(f"the new process of {running.key} answered its first request with {status}")
