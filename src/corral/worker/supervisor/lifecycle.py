"""The lifecycle of one process: start, wait until ready, watch, restart.

`ProcessLifecycle.keep` is one task per process. It changes the row it keeps, and nothing else; `supervisor.py` decides
that there is a row, and when it should go.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from corral.contract.manifest import LOCALAI
from corral.contract.messages.replicas import ReplicaState
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed
from corral.kit.log import get_log
from corral.kit.tasks import run_until
from corral.worker.settings.processes import ProcessSettings
from corral.worker.supervisor import folders
from corral.worker.supervisor.launch import is_port_free, plan_run
from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.ports import PortAllocator
from corral.worker.supervisor.process import BackendProcess, ShimLink, spawn_shim
from corral.worker.supervisor.readiness import StartFailed, load, start_failed, wait_until_ready
from corral.worker.supervisor.spec import ProcessSpec, Record
from corral.worker.supervisor.states import GiveUp, ProcessEvent, RestartIn, decide_restart
from corral.worker.supervisor.table import Entry, Table
from corral.worker.system.libraries import explain_missing, libraries_named_in, packages_for
from corral.worker.system.packages import PackageManager
from corral.worker.system.users import BackendUser, give_folder

log = get_log(__name__)


class ProcessLifecycle:
    def __init__(
        self,
        settings: ProcessSettings,
        folder: Path,
        table: Table,
        ports: PortAllocator,
        logs: LogBook,
        *,
        user: BackendUser,
        builds: Path | None,
        clock: Clock,
        environ: Mapping[str, str],
        begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._user = user
        self._builds = builds
        self._table = table
        self._ports = ports
        self._logs = logs
        self._clock = clock
        self._environ = environ
        self._begin = begin
        self._on_change = on_change

    async def keep(self, entry: Entry, *, runs: bool = False) -> None:
        """Keep the process running until it is stopped or has failed for good. `runs`: it was adopted and runs
        already."""
        try:
            while True:
                error = None if runs else await self._bring_up(entry)
                runs = False
                if error is None and not entry.leave.is_set():
                    error = await self._wait_for_end(entry)
                if error is None or entry.leave.is_set():
                    return  # `Supervisor.stop` does the rest
                if not await self._comes_back(entry, error):
                    return
        except Exception as error:
            log.exception("watching a process failed", key=entry.key, process=entry.process_id)
            if entry.leave.is_set():
                return
            entry.state = ReplicaState.FAILED
            entry.failed(Failed(f"the supervisor failed: {error!r}"))
            await self.take_down(entry)
            self._on_change()

    def watch(self, entry: Entry, folder: Path, link: ShimLink) -> BackendProcess:
        """Watch the shim until the process ends."""
        process = BackendProcess(folder, link, lambda lines: self._logs.append(entry.key, lines))
        entry.process = process
        self._begin(process.watch())
        return process

    async def take_down(self, entry: Entry) -> None:
        """Kill what is left of the process; its port is released when it has ended."""
        process = entry.process
        if process is not None and not process.ended.done():
            process.kill()
            if await process.wait(self._settings.backend_kill_wait_s) is None:
                log.error("a killed process still runs", key=entry.key, process=entry.process_id)
                return
        self.release(entry)

    def release(self, entry: Entry) -> None:
        if entry.port:
            self._ports.release(entry.port, self._clock.monotonic())
            entry.port = 0

    async def _bring_up(self, entry: Entry) -> CorralError | None:
        """Start the process. None when it serves, or when it was stopped before."""
        began = time.monotonic()
        try:
            # Not cancelled halfway: nobody would watch the shim.
            process = await self._start(entry)
            await run_until(entry.leave, self._await_ready(entry, process))
        except CorralError as failure:
            error = with_missing_libraries(failure, entry.spec)
            if not entry.leave.is_set():
                log.warning("process did not start", key=entry.key, process=entry.process_id, error=error.message)
                await self.take_down(entry)
            return error
        if not entry.leave.is_set():
            entry.move(ProcessEvent.ANSWERED)
            entry.ready_since = time.monotonic()
            entry.error = ""
            entry.answered()
            self._on_change()
            took = round(time.monotonic() - began, 2)
            log.info("process ready", key=entry.key, process=entry.process_id, port=entry.port, took_s=took)
        return None

    async def _start(self, entry: Entry) -> BackendProcess:
        spec = entry.spec
        entry.process = None
        entry.ready_at, entry.ready_since = "", 0.0
        entry.started_at = _rfc3339(self._clock.now())
        now = self._clock.monotonic()
        taken = self._ports.take(spec.key, now, lambda port: is_port_free(port, spec.listen_host))
        entry.port = taken.port
        if taken.stolen_from:
            log.warning(
                "a port that another key used lately is reused", port=taken.port, had=taken.stolen_from, has=spec.key
            )
        try:
            if await asyncio.to_thread((self._folder / entry.process_id).exists):
                self._table.rename(entry, new_process_id())  # a repeated order, whose first process has ended
            folder = await asyncio.to_thread(self._prepare, entry)
            log.info("process starts", key=entry.key, process=entry.process_id, port=entry.port, backend=spec.backend)
            await spawn_shim(folder, timeout_s=self._settings.backend_shim_timeout_s)
            link = await self._greet(folder)
        except OSError as error:
            raise Failed(f"cannot start {spec.backend}: {error}") from error
        return self.watch(entry, folder, link)

    def _prepare(self, entry: Entry) -> Path:
        run = plan_run(
            entry.spec,
            entry.process_id,
            entry.port,
            entry.token,
            self._settings,
            self._environ,
            backend_user=self._user,
        )
        if run.user is not None and entry.spec.manifest.command == LOCALAI.command and self._is_ours(run.directory):
            give_folder(Path(run.directory), run.user)
        record = Record(
            run=run,
            process=entry.spec,
            port=entry.port,
            token=entry.token,
            restarts=entry.restarts,
            failures=entry.failures,
            started_at=entry.started_at,
        )
        folders.sweep(self._folder, self._settings.backend_logs_kept)
        return folders.make_folder(self._folder, entry.process_id, record)

    def _is_ours(self, directory: str) -> bool:
        """Whether the build is in the worker's own folder, not one of the system."""
        return self._builds is not None and Path(directory).is_relative_to(self._builds)

    async def _greet(self, folder: Path) -> ShimLink:
        try:
            return await ShimLink.open(folder, timeout_s=self._settings.backend_shim_timeout_s)
        except Failed as error:
            said = await asyncio.to_thread(_read_errors, folder)
            raise StartFailed(f"{error.message}; {said}" if said else error.message) from error

    async def _await_ready(self, entry: Entry, process: BackendProcess) -> None:
        await wait_until_ready(process, entry.spec, entry.endpoint, self._settings)
        await load(process, entry.spec, entry.endpoint)
        entry.ready_at = _rfc3339(self._clock.now())
        # Before the start is reported: a worker that dies right after the report must adopt the process.
        await asyncio.to_thread(folders.mark_ready, process.folder, entry.ready_at)

    async def _wait_for_end(self, entry: Entry) -> CorralError | None:
        """Why the process ended; None when it was stopped."""
        process = entry.process
        assert process is not None
        leaving = asyncio.ensure_future(entry.leave.wait())
        try:
            await asyncio.wait((process.ended, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if entry.leave.is_set():
            return None
        how = process.ended.result()
        log.warning("process ended", key=entry.key, process=entry.process_id, how=str(how))
        self.release(entry)
        return with_missing_libraries(start_failed(f"{entry.backend} {how}", process), entry.spec)

    async def _comes_back(self, entry: Entry, error: CorralError) -> bool:
        """Wait until the next start. False when there is none."""
        if entry.ready_since == 0.0 and entry.restarts == 0:
            entry.move(ProcessEvent.NEVER_RAN)
            self._table.drop(entry)
            entry.failed(error)
            self._on_change()
            return False
        ran_s = time.monotonic() - entry.ready_since if entry.ready_since else 0.0
        match decide_restart(entry.spec.restart, failures=entry.failures, ran_s=ran_s):
            case GiveUp(failures):
                entry.failures = failures
                entry.move(ProcessEvent.GIVEN_UP)
                entry.failed(error)
                self._on_change()
                log.error("process failed for good", key=entry.key, failures=failures)
                return False
            case RestartIn(seconds, failures):
                entry.failures = failures
                entry.move(ProcessEvent.ENDED)
                entry.failed(error)
                entry.answer = asyncio.get_running_loop().create_future()
                self._on_change()
                return await self._wait_for_turn(entry, seconds)

    async def _wait_for_turn(self, entry: Entry, seconds: float) -> bool:
        log.info("process will be started again", key=entry.key, in_s=round(seconds, 2), failures=entry.failures)
        entry.hurry.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (entry.leave, entry.hurry)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in waits:
                waiting.cancel()
        if entry.leave.is_set():
            return False
        entry.move(ProcessEvent.AGAIN)
        entry.restarts += 1
        self._table.rename(entry, new_process_id())
        self._on_change()
        return True


def with_missing_libraries(error: CorralError, spec: ProcessSpec) -> CorralError:
    """If the last lines of a process name a missing library, begin the error with it and the command that installs
    it."""
    libraries = libraries_named_in(error.message.splitlines())
    if not isinstance(error, StartFailed) or not libraries:
        return error
    packages = packages_for(libraries, spec.manifest.needs)
    return StartFailed(f"{explain_missing(spec.backend, libraries, packages, PackageManager())}\n{error.message}")


def new_process_id() -> str:
    return uuid.uuid4().hex


def _rfc3339(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _read_errors(folder: Path) -> str:
    try:
        return (folder / "shim.err").read_text(errors="replace").strip()[-2000:]
    except OSError:
        return ""
