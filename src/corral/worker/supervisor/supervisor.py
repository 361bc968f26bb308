"""The worker's backend processes: start, find, stop, adopt.

Everything that decides on the table happens between two awaits, so there is no lock, and no call is made under one;
what was true before an await is looked at again after it. Which process should run where is the controller's business,
how a backend is installed the installer's, relaying to a process the ingress's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from corral.contract.manifest import GRPC
from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import Conflict, Failed, NotFound, Unavailable
from corral.kit.files import make_private_folder
from corral.kit.log import get_log
from corral.worker.hardware.usage import DeviceGauge
from corral.worker.settings.processes import PortRange, ProcessSettings
from corral.worker.supervisor import folders
from corral.worker.supervisor.adopt import Alive, Over, Refused, examine
from corral.worker.supervisor.keys import choose_by_name
from corral.worker.supervisor.lifecycle import ProcessLifecycle, new_process_id
from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.ports import PortBook
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.states import Happened
from corral.worker.supervisor.table import Entry, Running, Stopped, Table, new_token
from corral.worker.supervisor.tail import LogTail
from corral.worker.supervisor.usage import coarse, held_now, most_held
from corral.worker.system.users import BackendUser

log = get_log(__name__)


class Supervisor:
    """`async with`: leaving lets go of the processes, which run on; `stop_all` ends them."""

    def __init__(
        self,
        settings: ProcessSettings,
        folder: Path,
        *,
        user: BackendUser | None = None,
        builds: Path | None = None,
        gauge: DeviceGauge | None = None,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder` holds one folder for each process; nobody else writes there. `user`: whom backends run as, the
        worker's own user if None. `builds`: the folder of installed backends, which that user may be given. `gauge`
        measures the memory of accelerators."""
        clock = clock or SystemClock()
        self.logs = LogBook(lines=settings.backend_log_lines)
        self._settings = settings
        self._folder = folder
        self._gauge = gauge
        self._table = Table()
        self._ports = PortBook(
            settings.port_range.spread(str(folder)), settings.backend_port_rest_s, settings.backend_port_claim_s
        )
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._group = asyncio.TaskGroup()
        self._lifecycle = ProcessLifecycle(
            settings,
            folder,
            self._table,
            self._ports,
            self.logs,
            user=user or BackendUser(),
            builds=builds,
            clock=clock,
            environ=os.environ if environ is None else environ,
            begin=self._begin,
            on_change=on_change,
        )
        self._on_change = on_change

    async def __aenter__(self) -> Supervisor:
        await asyncio.to_thread(make_private_folder, self._folder)
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.let_go()
        if error is not None and not isinstance(error, asyncio.CancelledError):
            kind = error = traceback = None  # the group would wrap it, and whoever waits for it would not know it
        await self._group.__aexit__(kind, error, traceback)

    async def let_go(self) -> None:
        """Watch nothing and start nothing any more; what runs, runs on. Before a successor adopts: two who watch one
        process would both start it again."""
        self._closing = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for entry in self._table:
            if entry.process is not None:
                entry.process.let_go()
        self._table.clear()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- asking ------------------------------------------------------------------------------------------------------

    def find(self, process_id: str) -> Running | None:
        """The process of exactly this id, if it serves: what the ingress relays to."""
        entry = self._table.find(process_id)
        return entry.running() if entry is not None and entry.state is ReplicaState.READY else None

    def find_key(self, key: str) -> Running | None:
        """The process that serves under a key; the newer one while it replaces another."""
        serving = [entry for entry in self._table.of_key(key) if entry.serves()]
        return serving[-1].running() if serving else None

    def state_of(self, key: str) -> ReplicaState | None:
        rows = self._table.of_key(key)
        return rows[-1].state if rows else None

    def serving(self) -> tuple[Running, ...]:
        return tuple(entry.running() for entry in self._table.ready())

    def list_processes(self) -> tuple[ReplicaProcess, ...]:
        """Every process, for the heartbeat."""
        return tuple(entry.described() for entry in self._table)

    async def measure(self) -> None:
        """See what each process has come to hold. Heartbeats tell the most that was seen."""
        users = Counter(device for entry in self._table for device in entry.spec.devices)
        for entry in self._table:
            if entry.state is not ReplicaState.READY or entry.process is None:
                continue
            shim, devices = entry.process.identity.shim_pid, entry.spec.devices
            if not devices:
                entry.peak_bytes = max(entry.peak_bytes, coarse(await asyncio.to_thread(most_held, shim)))
            elif self._gauge is not None:
                alone = [device for device in devices if users[device] == 1]
                seen = await asyncio.to_thread(held_now, shim, self._gauge, devices, alone)
                entry.rose_to(tuple(map(coarse, seen)))

    def specs_of(self, backends: Collection[str]) -> dict[str, ProcessSpec]:
        """What was asked for, by process id: every process of a backend, under any of its names, that serves, starts,
        or is to be started again."""
        gone = (ReplicaState.STOPPING, ReplicaState.FAILED)
        mine = [entry for entry in self._table if entry.backend in backends and entry.state not in gone]
        return {entry.process_id: entry.spec for entry in mine}

    def directories(self) -> frozenset[Path]:
        """The folders something runs from, or is about to."""
        alive = [entry for entry in self._table if entry.state is not ReplicaState.FAILED]
        return frozenset(Path(entry.spec.directory) for entry in alive)

    def model_files(self) -> frozenset[Path]:
        """The files they read, or will read when they are started again."""
        alive = [entry for entry in self._table if entry.state is not ReplicaState.FAILED]
        return frozenset(Path(entry.spec.model_file) for entry in alive if entry.spec.model_file)

    @property
    def ports(self) -> PortRange:
        return self._ports.ports

    def use_ports(self, ports: PortRange) -> None:
        """For what is started from now on."""
        self._ports.change_range(ports)

    # -- starting ----------------------------------------------------------------------------------------------------

    async def start(self, spec: ProcessSpec, *, beside: bool = False) -> Running:
        """A process that serves. One that serves already is the answer at once; one on its way is waited for; one
        that waits for its restart is not kept waiting. `beside` starts a second one under the same key, to replace the
        first. Raises StartFailed (with its last lines), Conflict, NoFreePort, Unavailable when the worker is leaving.
        Giving up the wait does not stop the start: `stop` does."""
        entry = self._claim(spec, beside)
        if entry.state is ReplicaState.READY and not entry.serves():
            await self._notice_end(entry)
            entry = self._claim(spec, beside)
        if entry.state is not ReplicaState.READY:
            entry.hurry.set()
            answer = entry.answer  # of this attempt: another may have begun by the time we look
            await asyncio.wait([answer])
            answer.result()
        if entry not in self._table or entry.state is not ReplicaState.READY:
            raise Conflict(f"{spec.key} was stopped while it started")
        return entry.running()

    async def _notice_end(self, entry: Entry) -> None:
        """It was killed a moment ago. Its shim will say so; until then it stands there as if it served."""
        try:
            async with asyncio.timeout(self._settings.backend_shim_timeout_s):
                while entry.state is ReplicaState.READY and entry in self._table:
                    await entry.moved.wait()
        except TimeoutError as error:
            raise Failed(f"{entry.key} has ended, and its shim does not say how") from error

    def _claim(self, spec: ProcessSpec, beside: bool) -> Entry:
        if self._closing:
            raise Unavailable("this worker is leaving and starts nothing any more")
        for entry in self._rivals(spec, beside):
            match entry.state:
                case ReplicaState.FAILED:
                    self._table.drop(entry)
                case ReplicaState.STOPPING:
                    raise Conflict(f"{spec.key} is still stopping")
                case _ if entry.spec.is_same_as(spec):
                    return entry
                case _:
                    raise Conflict(f"{spec.key} runs already, of {_which(entry.spec)}: not of {_which(spec)}")
        entry = Entry(spec, spec.process_id or new_process_id(), new_token(spec))
        folders.check_process_id(entry.process_id)
        self._table.add(entry)
        entry.keeper = self._begin(self._lifecycle.keep(entry))
        self._on_change()
        return entry

    def _rivals(self, spec: ProcessSpec, beside: bool) -> list[Entry]:
        named = self._table.find(spec.process_id) if spec.process_id else None
        if named is not None:
            return [named]  # the same order again
        return [] if beside else self._table.of_key(spec.key)

    # -- stopping ----------------------------------------------------------------------------------------------------

    async def stop(self, process_id: str, *, grace_s: float | None = None, force: bool = False) -> Stopped:
        """Free, SIGTERM, after the grace SIGKILL, all of its children too. `force` leaves out Free. Raises NotFound."""
        entry = self._table.find(process_id)
        if entry is None:
            raise NotFound(f"there is no process {process_id}")
        return await self._stop(entry, grace_s, force)

    async def stop_key(self, key: str, *, grace_s: float | None = None, force: bool = False) -> list[Stopped]:
        return await self._stop_each(self._table.of_key(key), grace_s, force)

    async def stop_named(
        self, name: str, backends: Collection[str] = (), *, grace_s: float | None = None, force: bool = False
    ) -> list[Stopped]:
        """What `backend.stop` means by a name; see `keys.choose_by_name`."""
        return await self._stop_each(choose_by_name(self._table, name, backends), grace_s, force)

    async def stop_backend(
        self, backends: Collection[str], *, grace_s: float | None = None, force: bool = False
    ) -> list[Stopped]:
        """Every process of a backend, under any of its names."""
        mine = [entry for entry in self._table if entry.backend in backends]
        return await self._stop_each(mine, grace_s, force)

    async def stop_all(
        self, *, grace_s: float | None = None, force: bool = False, closing: bool = False
    ) -> list[Stopped]:
        """All that are there now, at once. `closing`: and nothing is started any more."""
        self._closing = self._closing or closing
        return await self._stop_each(list(self._table), grace_s, force)

    async def _stop_each(self, entries: list[Entry], grace_s: float | None, force: bool) -> list[Stopped]:
        return list(await asyncio.gather(*(self._stop(entry, grace_s, force) for entry in entries)))

    async def _stop(self, entry: Entry, grace_s: float | None, force: bool) -> Stopped:
        """One stop per process: whoever comes second waits for the same end."""
        if entry.stopping is None:
            was_ready = entry.state is ReplicaState.READY
            if entry.state is not ReplicaState.STOPPING:  # it is when an earlier stop did not get rid of it
                entry.move(Happened.STOP)
            entry.leave.set()
            entry.stopping = asyncio.get_running_loop().create_future()
            if not entry.answer.done():
                entry.failed(Conflict(f"{entry.key} was stopped while it started"))
            self._on_change()
            grace = self._settings.backend_grace_s if grace_s is None else grace_s
            self._begin(self._carry_out_stop(entry, grace, free=was_ready and not force))
        elif force and entry.process is not None:
            entry.process.stop(self._settings.backend_grace_s if grace_s is None else grace_s)  # the earlier end counts
        ending = entry.stopping
        await asyncio.wait([ending])
        return ending.result()

    async def _carry_out_stop(self, entry: Entry, grace_s: float, *, free: bool) -> None:
        outcome = Stopped(entry.process_id, entry.key, entry.address, terminated=False, error="the stop was given up")
        ending = entry.stopping
        assert ending is not None
        try:
            outcome = await self._end(entry, grace_s, free=free)
        finally:
            ending.set_result(outcome)

    async def _end(self, entry: Entry, grace_s: float, *, free: bool) -> Stopped:
        address, freed, error = entry.address, False, ""
        if entry.keeper is not None:
            await asyncio.wait([entry.keeper])  # a start is not given up halfway
        process = entry.process
        if process is not None and not process.ended.done():
            if free and entry.spec.protocol == GRPC:
                error = await self._free(entry) or ""
                freed = not error
            process.stop(grace_s)
            if await process.wait(grace_s + self._settings.backend_kill_wait_s) is None:
                return self._still_there(entry, address, freed)
        self._gone(entry)
        log.info("process stopped", key=entry.key, process=entry.process_id, freed=freed)
        return Stopped(entry.process_id, entry.key, address, freed, True, error)

    def _still_there(self, entry: Entry, address: str, freed: bool) -> Stopped:
        """It keeps its row and its port, serves nobody, and may be stopped again."""
        log.error("a killed process is still there", key=entry.key, process=entry.process_id)
        entry.error = "it was killed and is still there: something in the kernel holds it"
        entry.stopping = entry.keeper = None
        self._begin(self._wait_for_the_last(entry))
        return Stopped(entry.process_id, entry.key, address, freed, False, entry.error)

    async def _wait_for_the_last(self, entry: Entry) -> None:
        if entry.process is not None:
            await asyncio.wait([entry.process.ended])
        if entry in self._table and entry.stopping is None:
            self._gone(entry)

    def _gone(self, entry: Entry) -> None:
        self._lifecycle.release(entry)
        entry.move(Happened.STOPPED)
        self._table.drop(entry)
        self._on_change()

    async def free(self, process_id: str) -> str | None:
        """Ask exactly this process to release its memory; None, or why it did not."""
        entry = self._table.find(process_id)
        if entry is None or entry.state is not ReplicaState.READY:
            return f"there is no process {process_id}"
        return await self._free(entry) if entry.spec.protocol == GRPC else "an openai backend has no Free"

    async def _free(self, entry: Entry) -> str | None:
        from corral.worker.supervisor.grpc_calls import free  # see there: memory

        return await free(entry.address, entry.token, self._settings.backend_free_timeout_s)

    # -- adopting ----------------------------------------------------------------------------------------------------

    async def adopt(self) -> tuple[Running, ...]:
        """Take over what an earlier worker left running; before anything is started. A process that was not ready yet
        is ended: whoever ordered it will ask again, and nobody knows how far it came."""
        found = await asyncio.gather(
            *(
                examine(folder, timeout_s=self._settings.backend_shim_timeout_s)
                for folder in await asyncio.to_thread(folders.list_folders, self._folder)
            )
        )
        await self._remember([each for each in found if isinstance(each, Over)])
        for each in found:
            if isinstance(each, Refused):
                log.warning("process not adopted", folder=str(each.folder), why=each.why)
        adopted = [self._take_over(each) for each in found if isinstance(each, Alive)]
        await asyncio.gather(*(self._stop(entry, 0.0, True) for entry in adopted if not entry.ready_at))
        self._on_change()
        return self.serving()

    def _take_over(self, alive: Alive) -> Entry:
        record = alive.record
        entry = Entry(
            record.process,
            record.run.process_id,
            record.token,
            state=ReplicaState.READY if alive.ready_at else ReplicaState.STARTING,
            port=record.port,
            started_at=record.started_at,
            ready_at=alive.ready_at or "",
            ready_since=time.monotonic() if alive.ready_at else 0.0,
            restarts=record.restarts,
            failures=record.failures,
        )
        self._table.add(entry)
        self._ports.hold(record.port, entry.key)
        self._lifecycle.watch(entry, alive.folder, alive.link)
        if alive.ready_at:
            entry.answered()
            entry.keeper = self._begin(self._lifecycle.keep(entry, runs=True))
            log.info("process adopted", key=entry.key, process=entry.process_id, pid=alive.link.identity.pid)
        return entry

    async def _remember(self, over: list[Over]) -> None:
        """What ended processes said last, and room on the disk."""
        for each in sorted(over, key=lambda each: each.how.at):
            if each.record is not None:
                with contextlib.suppress(OSError):
                    lines = await asyncio.to_thread(LogTail(each.folder).read)
                    self.logs.append(each.record.process.key, lines)
        await asyncio.to_thread(folders.sweep, self._folder, self._settings.backend_logs_kept)


def _which(spec: ProcessSpec) -> str:
    return " ".join(word for word in (spec.backend, spec.digest, spec.revision) if word)
