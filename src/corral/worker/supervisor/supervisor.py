"""The worker's backend processes: start, find, stop, adopt.

Every decision on the table happens between two awaits, so no lock is needed; after an await the table is read again.
The controller decides which processes run, the installer installs backends, and the ingress relays to processes.
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
from corral.worker.supervisor.adopt import EndedProcess, NotAdopted, RunningProcess, examine
from corral.worker.supervisor.keys import choose_by_name
from corral.worker.supervisor.lifecycle import ProcessLifecycle, new_process_id
from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.ports import PortAllocator
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.states import ProcessEvent
from corral.worker.supervisor.table import Entry, Running, Stopped, Table, new_token
from corral.worker.supervisor.tail import LogTail
from corral.worker.supervisor.usage import device_bytes, peak_ram_bytes, rounded_up
from corral.worker.system.users import BackendUser

log = get_log(__name__)
_READY = ReplicaState.READY  # `find` runs for every request; to look up a member of an enum takes 0.17 µs


class Supervisor:
    """`async with`: processes run on when the block is left; `stop_all` stops them."""

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
        self._ports = PortAllocator(
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
        await self.release_all()
        if error is not None and not isinstance(error, asyncio.CancelledError):
            kind = error = traceback = None  # the group would wrap the error, and the caller expects it as it is
        await self._group.__aexit__(kind, error, traceback)

    async def release_all(self) -> None:
        """Watch and start no process any more; running processes run on. Called before a new worker adopts them: two
        workers would both restart a process."""
        self._closing = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for entry in self._table:
            if entry.process is not None:
                entry.process.detach()
        self._table.clear()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- queries -----------------------------------------------------------------------------------------------------

    def find(self, process_id: str) -> Running | None:
        """The process with exactly this id, if it serves: the ingress relays to it."""
        entry = self._table.find(process_id)
        return entry.running() if entry is not None and entry.state is _READY else None

    def find_key(self, key: str) -> Running | None:
        """The process that serves under a key; the newer of two while one replaces the other."""
        serving = [entry for entry in self._table.of_key(key) if entry.serves()]
        return serving[-1].running() if serving else None

    def state_of(self, key: str) -> ReplicaState | None:
        rows = self._table.of_key(key)
        return rows[-1].state if rows else None

    def serving(self) -> tuple[Running, ...]:
        return tuple(entry.running() for entry in self._table.ready())

    def list_processes(self) -> tuple[ReplicaProcess, ...]:
        """Every process, for the heartbeat."""
        return tuple(entry.report() for entry in self._table)

    async def measure(self) -> None:
        """Measure the memory of each process. Heartbeats report the peak."""
        users = Counter(device for entry in self._table for device in entry.spec.devices)
        for entry in self._table:
            if entry.state is not ReplicaState.READY or entry.process is None:
                continue
            shim, devices = entry.process.identity.shim_pid, entry.spec.devices
            if not devices:
                entry.peak_bytes = max(entry.peak_bytes, rounded_up(await asyncio.to_thread(peak_ram_bytes, shim)))
            elif self._gauge is not None:
                alone = [device for device in devices if users[device] == 1]
                seen = await asyncio.to_thread(device_bytes, shim, self._gauge, devices, alone)
                entry.record_peak(tuple(map(rounded_up, seen)))

    def specs_of(self, backends: Collection[str]) -> dict[str, ProcessSpec]:
        """Specs by process id: of every process of a backend, under any of its names, that serves, starts, or will be
        restarted."""
        gone = (ReplicaState.STOPPING, ReplicaState.FAILED)
        mine = [entry for entry in self._table if entry.backend in backends and entry.state not in gone]
        return {entry.process_id: entry.spec for entry in mine}

    def directories(self) -> frozenset[Path]:
        """Folders of builds that a process runs from, or will run from."""
        alive = [entry for entry in self._table if entry.state is not ReplicaState.FAILED]
        return frozenset(Path(entry.spec.directory) for entry in alive)

    def model_files(self) -> frozenset[Path]:
        """Model files that processes read, or will read when they are restarted."""
        alive = [entry for entry in self._table if entry.state is not ReplicaState.FAILED]
        return frozenset(Path(entry.spec.model_file) for entry in alive if entry.spec.model_file)

    @property
    def ports(self) -> PortRange:
        return self._ports.ports

    def use_ports(self, ports: PortRange) -> None:
        """Use these ports for processes that start from now on."""
        self._ports.change_range(ports)

    # -- starting ----------------------------------------------------------------------------------------------------

    async def start(self, spec: ProcessSpec, *, beside: bool = False) -> Running:
        """Start a process and wait until it serves. A process that serves already is returned at once; one that starts
        is waited for; one that waits for its restart is started now. `beside` starts a second process under the same
        key, to replace the first. Raises StartFailed (with its last lines), Conflict, NoFreePort, Unavailable when the
        worker is leaving. Cancelling the wait does not stop the start: `stop` does."""
        entry = self._claim(spec, beside)
        if entry.state is ReplicaState.READY and not entry.serves():
            await self._notice_end(entry)
            entry = self._claim(spec, beside)
        if entry.state is not ReplicaState.READY:
            entry.hurry.set()
            answer = entry.answer  # of this attempt: the next one has another future
            await asyncio.wait([answer])
            answer.result()
        if entry not in self._table or entry.state is not ReplicaState.READY:
            raise Conflict(f"{spec.key} was stopped while it started")
        return entry.running()

    async def _notice_end(self, entry: Entry) -> None:
        """The process was killed a moment ago: wait until its shim reports that."""
        try:
            async with asyncio.timeout(self._settings.backend_shim_timeout_s):
                while entry.state is ReplicaState.READY and entry in self._table:
                    await entry.moved.wait()
        except TimeoutError as error:
            raise Failed(f"{entry.key} has ended, and its shim does not report how") from error

    def _claim(self, spec: ProcessSpec, beside: bool) -> Entry:
        if self._closing:
            raise Unavailable("this worker is leaving and starts no processes")
        for entry in self._conflicting(spec, beside):
            match entry.state:
                case ReplicaState.FAILED:
                    self._table.drop(entry)
                case ReplicaState.STOPPING:
                    raise Conflict(f"{spec.key} is still stopping")
                case _ if entry.spec.is_same_as(spec):
                    return entry
                case _:
                    raise Conflict(f"{spec.key} runs already, of {_version_of(entry.spec)}: not of {_version_of(spec)}")
        entry = Entry(spec, spec.process_id or new_process_id(), new_token(spec))
        folders.check_process_id(entry.process_id)
        self._table.add(entry)
        entry.keeper = self._begin(self._lifecycle.keep(entry))
        self._on_change()
        return entry

    def _conflicting(self, spec: ProcessSpec, beside: bool) -> list[Entry]:
        named = self._table.find(spec.process_id) if spec.process_id else None
        if named is not None:
            return [named]  # a repeated order
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
        """Stop all processes at once. `closing`: start no process any more."""
        self._closing = self._closing or closing
        return await self._stop_each(list(self._table), grace_s, force)

    async def _stop_each(self, entries: list[Entry], grace_s: float | None, force: bool) -> list[Stopped]:
        return list(await asyncio.gather(*(self._stop(entry, grace_s, force) for entry in entries)))

    async def _stop(self, entry: Entry, grace_s: float | None, force: bool) -> Stopped:
        """Stop one process; a second call waits for the same end."""
        if entry.stopping is None:
            was_ready = entry.state is ReplicaState.READY
            if entry.state is not ReplicaState.STOPPING:  # an earlier stop failed
                entry.move(ProcessEvent.STOP)
            entry.leave.set()
            entry.stopping = asyncio.get_running_loop().create_future()
            if not entry.answer.done():
                entry.failed(Conflict(f"{entry.key} was stopped while it started"))
            self._on_change()
            grace = self._settings.backend_grace_s if grace_s is None else grace_s
            self._begin(self._carry_out_stop(entry, grace, free=was_ready and not force))
        elif force and entry.process is not None:
            # The earlier deadline counts.
            entry.process.stop(self._settings.backend_grace_s if grace_s is None else grace_s)
        ending = entry.stopping
        await asyncio.wait([ending])
        return ending.result()

    async def _carry_out_stop(self, entry: Entry, grace_s: float, *, free: bool) -> None:
        outcome = Stopped(entry.process_id, entry.key, entry.address, terminated=False, error="the stop was cancelled")
        ending = entry.stopping
        assert ending is not None
        try:
            outcome = await self._end(entry, grace_s, free=free)
        finally:
            ending.set_result(outcome)

    async def _end(self, entry: Entry, grace_s: float, *, free: bool) -> Stopped:
        address, freed, error = entry.address, False, ""
        if entry.keeper is not None:
            await asyncio.wait([entry.keeper])  # a start is not cancelled halfway
        process = entry.process
        if process is not None and not process.ended.done():
            if free and entry.spec.protocol == GRPC:
                error = await self._free(entry) or ""
                freed = not error
            process.stop(grace_s)
            if await process.wait(grace_s + self._settings.backend_kill_wait_s) is None:
                return self._survived(entry, address, freed)
        self._gone(entry)
        log.info("process stopped", key=entry.key, process=entry.process_id, freed=freed)
        return Stopped(entry.process_id, entry.key, address, freed, True, error)

    def _survived(self, entry: Entry, address: str, freed: bool) -> Stopped:
        """A killed process still runs: it keeps its row and its port, serves no requests, and may be stopped again."""
        log.error("a killed process still runs", key=entry.key, process=entry.process_id)
        entry.error = "it was killed and still runs: it hangs in a kernel call"
        entry.stopping = entry.keeper = None
        self._begin(self._wait_for_end(entry))
        return Stopped(entry.process_id, entry.key, address, freed, False, entry.error)

    async def _wait_for_end(self, entry: Entry) -> None:
        if entry.process is not None:
            await asyncio.wait([entry.process.ended])
        if entry in self._table and entry.stopping is None:
            self._gone(entry)

    def _gone(self, entry: Entry) -> None:
        self._lifecycle.release(entry)
        entry.move(ProcessEvent.STOPPED)
        self._table.drop(entry)
        self._on_change()

    async def free(self, process_id: str) -> str | None:
        """Ask exactly this process to free its memory. Returns None, or why it did not."""
        entry = self._table.find(process_id)
        if entry is None or entry.state is not ReplicaState.READY:
            return f"there is no process {process_id}"
        return await self._free(entry) if entry.spec.protocol == GRPC else "an openai backend has no Free"

    async def _free(self, entry: Entry) -> str | None:
        from corral.worker.supervisor.grpc_calls import free  # see there: memory

        return await free(entry.address, entry.token, self._settings.backend_free_timeout_s)

    # -- adopting ----------------------------------------------------------------------------------------------------

    async def adopt(self) -> tuple[Running, ...]:
        """Adopt the processes of an earlier worker, before any process starts. A process that was not ready yet is
        stopped: its order will be repeated."""
        found = await asyncio.gather(
            *(
                examine(folder, timeout_s=self._settings.backend_shim_timeout_s)
                for folder in await asyncio.to_thread(folders.list_folders, self._folder)
            )
        )
        await self._remember([each for each in found if isinstance(each, EndedProcess)])
        for each in found:
            if isinstance(each, NotAdopted):
                log.warning("process not adopted", folder=str(each.folder), why=each.why)
        adopted = [self._adopt_process(each) for each in found if isinstance(each, RunningProcess)]
        await asyncio.gather(*(self._stop(entry, 0.0, True) for entry in adopted if not entry.ready_at))
        self._on_change()
        return self.serving()

    def _adopt_process(self, alive: RunningProcess) -> Entry:
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

    async def _remember(self, over: list[EndedProcess]) -> None:
        """Keep the last log lines of ended processes, and remove their old folders."""
        for each in sorted(over, key=lambda each: each.how.at):
            if each.record is not None:
                with contextlib.suppress(OSError):
                    lines = await asyncio.to_thread(LogTail(each.folder).read)
                    self.logs.append(each.record.process.key, lines)
        await asyncio.to_thread(folders.sweep, self._folder, self._settings.backend_logs_kept)


def _version_of(spec: ProcessSpec) -> str:
    return " ".join(word for word in (spec.backend, spec.digest, spec.revision) if word)
