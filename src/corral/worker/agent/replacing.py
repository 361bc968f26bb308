"""Replacing the processes of a backend by ones of another version, without a gap (docs/explanation/design.md#upgrades).

The new ones are started beside the old ones. Only when every one of them serves does anything change; when one does
not, all of them go and the old ones serve on. Which version is the current one on the disk is the installer's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec

from corral.kit.errors import CorralError, Failed, NotFound
from corral.kit.log import get_log
from corral.worker.agent.probing import probe_once
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.supervisor.table import Running

log = get_log(__name__)
PROBE_S = 120.0
TRIES = 3


class Traffic(Protocol):
    """The ingress, as far as it matters here."""

    async def retire(self, process_id: str, timeout_s: float) -> bool:
        """No new requests from now on; whether those under way have ended within that time."""


@dataclass(frozen=True)
class Pair:
    old: str  # process ids
    new: str
    key: str


class Replacing:
    def __init__(self, supervisor: Supervisor, traffic: Traffic, *, drain_s: float, probe_s: float = PROBE_S) -> None:
        """`drain_s`: how long requests to the old process may take to end; `probe_s`: how long the new one may take
        for its first."""
        self._supervisor = supervisor
        self._traffic = traffic
        self._drain_s = drain_s
        self._probe_s = probe_s

    def users(self, backends: Collection[str]) -> dict[str, ProcessSpec]:
        """What runs of a backend, or is to run again."""
        return self._supervisor.specs_of(backends)

    async def start_beside(self, backends: Collection[str], build: InstalledBackend) -> list[Pair]:
        """A process of `build` for each that is of another one. Raises StartFailed and the like; the new ones are
        gone then, and the old ones have not noticed."""
        pairs: list[Pair] = []
        try:
            for process_id, spec in self.users(backends).items():
                if spec.directory == str(build.directory):
                    continue
                wanted = successor(spec, build)
                # A worker that was killed half way may have left it behind.
                new = self._find(wanted) or await self._supervisor.start(wanted, beside=True)
                await probe_once(new, self._probe_s)
                pairs.append(Pair(process_id, new.process_id, spec.key))
            if gone := [pair for pair in pairs if self._supervisor.find(pair.new) is None]:
                raise Failed(f"the new process of {gone[0].key} ended before it could take over")
        except BaseException:
            await self.give_up(backends, build)
            raise
        return pairs

    async def give_up(self, backends: Collection[str], build: InstalledBackend) -> None:
        """Not to be replaced after all: what runs of the new build beside an old one goes, also one that starts."""
        specs = self.users(backends)
        old = {spec.key for spec in specs.values() if spec.directory != str(build.directory)}
        new = [
            process_id
            for process_id, spec in specs.items()
            if spec.key in old and spec.directory == str(build.directory)
        ]
        await asyncio.gather(*(self._stop(process_id, force=True) for process_id in new))

    async def retire(self, pairs: list[Pair]) -> None:
        """The new ones have taken over: the old ones finish what they are at, and go."""
        await asyncio.gather(*(self._retire(pair) for pair in pairs))

    async def catch_up(self, backends: Collection[str], build: InstalledBackend) -> None:
        """After the switch: what was started from the old version meanwhile, or came back under another id."""
        try:
            await self.retire(await self.start_beside(backends, build))
        except CorralError as error:
            log.error("a process of the old version stays", backend=build.name, reason=error.message)

    async def _retire(self, pair: Pair) -> None:
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

    # Where the machine cannot hold both

    async def take_down(self, backends: Collection[str], build: InstalledBackend) -> list[ProcessSpec]:
        """End every process that is not of `build`, each after what it is at; what it takes to start them again."""
        down: dict[str, ProcessSpec] = {}
        for _ in range(TRIES):  # one that crashed meanwhile came back under another id
            users = self.users(backends)
            old = {each: spec for each, spec in users.items() if spec.directory != str(build.directory)}
            down |= {spec.key: msgspec.structs.replace(spec, process_id="") for spec in old.values()}
            await asyncio.gather(*(self._take_down(process_id) for process_id in old))
        return list(down.values())

    async def bring_up(self, specs: list[ProcessSpec]) -> None:
        """All of them, or none: raises what the first failure raises, with the others gone again."""
        started: list[Running] = []
        try:
            for spec in specs:
                started.append(await self._supervisor.start(spec))
                await probe_once(started[-1], self._probe_s)
        except BaseException:
            await asyncio.gather(*(self._stop(running.process_id, force=True) for running in started))
            raise

    async def bring_back(self, specs: list[ProcessSpec]) -> None:
        """What ran before, as far as it will."""
        for spec in specs:
            try:
                await self._supervisor.start(spec)
            except CorralError as error:
                log.error("a process could not be brought back", key=spec.key, reason=error.message)

    async def _take_down(self, process_id: str) -> None:
        if not await self._traffic.retire(process_id, self._drain_s):
            log.warning("a process is stopped with requests under way", process=process_id, waited_s=self._drain_s)
        await self._stop(process_id)

    async def stop_users(self, backends: Collection[str], keys: Collection[str] = (), *, force: bool) -> list[str]:
        """Stop every process of a backend, and those of these keys; the keys of those that were there. Raises Failed,
        naming it, for one that will not go."""
        stopped = await self._supervisor.stop_backend(backends, force=force)
        for key in keys:
            stopped += await self._supervisor.stop_key(key, force=force)
        if left := [each for each in stopped if not each.terminated]:
            raise StillThere([each.key for each in stopped if each.terminated], left[0].key, left[0].error)
        return list(dict.fromkeys(each.key for each in stopped))

    async def keep_one_each(self, current: Collection[str]) -> None:
        """After a start: a worker that was killed while it replaced a process left two under one key. The one of a
        current version stays. `current` are the folders of those."""
        by_key: dict[str, list[tuple[str, str]]] = {}
        for running in self._supervisor.serving():
            by_key.setdefault(running.key, []).append((running.process_id, running.directory))
        for key, found in by_key.items():
            keep = next((each for each in found if each[1] in current), found[-1])
            for process_id, _ in found:
                if process_id != keep[0]:
                    log.warning("two processes under one key, one goes", key=key, process=process_id)
                    await self._stop(process_id)


class StillThere(Failed):
    """A process was killed and is still there, so nothing is changed on the disk. `stopped` are those that are gone."""

    def __init__(self, stopped: list[str], key: str, why: str) -> None:
        super().__init__(f"{key} could not be stopped: {why}")
        self.stopped = stopped


def successor(spec: ProcessSpec, build: InstalledBackend) -> ProcessSpec:
    """The same process of another build. Pure."""
    return msgspec.structs.replace(
        spec, directory=str(build.directory), manifest=build.manifest, digest=build.digest, process_id=""
    )
