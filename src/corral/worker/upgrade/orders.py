"""The order that replaces this worker by another version of Corral (docs/reference/wire/releases.md).

This worker verifies the order and fetches the wheels; a process of its own builds, checks and tries the new version
(`worker/upgrade/detached.py`), because it outlives this one. The controller repeats the order until the upgrade has
ended. Whichever worker gets it then, this one or its successor, reads the state from upgrade.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import psutil

from corral import __version__
from corral.blobs.digests import PREFIX
from corral.blobs.errors import WrongDigest
from corral.blobs.progress import Progress
from corral.blobs.store import BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.bus.api import Tokens
from corral.contract.messages.models import DoneReply
from corral.contract.messages.releases import (
    CancelUpgrade,
    ReleasePackage,
    UpgradeState,
    UpgradeWorker,
    UpgradeWorkerReply,
)
from corral.contract.releases import MAX_WHEEL_BYTES, ReleaseOrder
from corral.kit.errors import CorralError, Denied, Failed, Invalid
from corral.kit.log import get_log
from corral.kit.subprocesses import environment_without_secrets
from corral.kit.tasks import KeyedTasks
from corral.kit.threads import in_daemon_thread
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.settings.node import UpgradeSettings
from corral.worker.status import WorkerStatus
from corral.worker.upgrade.build import read_wheel
from corral.worker.upgrade.release_pin import ReleasePin, check_order
from corral.worker.upgrade.trial import Trial, TrialState, read_trial
from corral.worker.upgrade.upgrade import is_upgrading
from corral.worker.upgrade.versions import Versions, find_versions, why_not

log = get_log(__name__)

FETCHING = "fetching"
REFUSED_BY_SETTING = "it was started with --self-upgrade=off: upgrade it on its machine, with `corral worker upgrade`"
MAX_PACKAGES = 500
MAX_PACKAGE_BYTES = 512 << 20
_FILES = "upgrade-files"  # beside the versions: the wheels of the order, until it has ended
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+!-]{0,200}\.whl\Z")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_MODULE = "corral.worker.upgrade.detached"
_POLL_S = 0.05


@dataclass
class _Fetch:
    """The transfer of one order's wheels, while it runs and after it has failed."""

    current_bytes: int = 0
    total_bytes: int = 0
    error: CorralError | None = None


class CorralUpgradeOrders:
    """`async with`: leaving the block ends the transfer of wheels; a process that builds or tries a version goes on."""

    def __init__(
        self,
        data: Path,
        pin: ReleasePin,
        fleet: FleetBlobs,
        store: BlobStore,
        *,
        settings: UpgradeSettings,
        status: WorkerStatus,
        program: Path | None = None,
    ) -> None:
        """`program`: the environment that this worker runs from."""
        self._data = data
        self._pin = pin
        self._fleet = fleet
        self._store = store
        self._settings = settings
        self._status = status
        self._program = (program or Path(sys.prefix)).resolve()
        self._versions = find_versions(self._program)
        self._tasks: KeyedTasks[str] = KeyedTasks()
        self._fetches: dict[str, _Fetch] = {}

    async def __aenter__(self) -> CorralUpgradeOrders:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._tasks.__aexit__(*error)  # type: ignore[arg-type]

    async def upgrade(self, order: UpgradeWorker, _tokens: Tokens) -> UpgradeWorkerReply:
        reply = await self._reply(order)
        return msgspec.structs.replace(
            reply,
            program=self._program.name if self._versions is not None else "",
            boot_id=self._status.boot_id,
            not_ready=self._status.not_ready_reason() or "",
        )

    async def _reply(self, order: UpgradeWorker) -> UpgradeWorkerReply:
        if why := self._why_refused():
            return _reply(UpgradeState.REFUSED, why, is_final=True)
        if not order.op_id:
            raise Invalid("an order to upgrade needs an op_id")
        if order.plan and not order.signed:  # of a release that nobody has signed yet
            return _reply(UpgradeState.RUNNING)
        try:
            release = check_order(await in_daemon_thread(self._pin.read), order.signed)
        except CorralError as error:
            log.warning("release refused", op=order.op_id, reason=error.message)
            return _reply(UpgradeState.FAILED, error.message, is_final=True)
        if order.plan:
            return _reply(self._planned(release))
        return await self._advance(order, release)

    async def cancel(self, order: CancelUpgrade, _tokens: Tokens) -> DoneReply:
        stopped = False
        for name in self._tasks.running():
            if _operation_of(name) == order.op_id:
                self._tasks.cancel(name)
                stopped = True
        if self._versions is not None:
            stopped = await in_daemon_thread(lambda: self._stop_build(order.op_id)) or stopped
        return DoneReply(success=stopped, error="" if stopped else "no such upgrade can be stopped any more")

    def _why_refused(self) -> str:
        if not self._settings.is_allowed:
            return REFUSED_BY_SETTING
        return "" if self._versions is not None else why_not(self._program)

    def _planned(self, release: ReleaseOrder) -> UpgradeState:
        runs_it = self._require_versions().folder(release.sha256).resolve() == self._program
        return UpgradeState.DONE if runs_it else UpgradeState.RUNNING

    async def _advance(self, order: UpgradeWorker, release: ReleaseOrder) -> UpgradeWorkerReply:
        assert self._versions is not None  # else it is refused
        name = f"{order.op_id}:{order.attempt}"
        trial = read_trial(self._data)
        busy = await in_daemon_thread(self._is_busy)
        runs_it = self._versions.folder(release.sha256).resolve() == self._program
        if runs_it and (trial is None or trial.has_ended or not busy):
            return _reply(UpgradeState.DONE)
        if trial is not None and trial.order == name and (trial.has_ended or busy):
            return _reply_of(trial)
        if busy and name not in self._tasks.running():
            return _reply(UpgradeState.FAILED, "another upgrade of this machine is in progress")
        fetch = self._fetches.get(name)
        if fetch is not None and fetch.error is not None:
            # Data that does not match what was signed will not match at the next attempt either.
            return _reply(UpgradeState.FAILED, fetch.error.message, is_final=isinstance(fetch.error, Invalid | Denied))
        if name not in self._tasks.running():
            for earlier in self._tasks.running():  # its wheels may never come, and its controller may have gone
                self._tasks.cancel(earlier)
            fetch = _Fetch(total_bytes=release.size_bytes + sum(each.size_bytes for each in order.packages))
            self._fetches = {name: fetch}
            self._tasks.start(name, lambda: self._begin(name, order, release, fetch), name=f"upgrade {name}")
        if fetch is None:  # replaced by a later order, and not ended yet
            return _reply(UpgradeState.FAILED, "another upgrade of this machine is in progress")
        return UpgradeWorkerReply(
            state=UpgradeState.RUNNING,
            phase=FETCHING,
            current_bytes=fetch.current_bytes,
            total_bytes=fetch.total_bytes,
            version=__version__,
        )

    async def _begin(self, name: str, order: UpgradeWorker, release: ReleaseOrder, fetch: _Fetch) -> None:
        """Fetch the wheels and start the process that does the rest. An error is kept for the next reply."""
        versions = self._require_versions()
        # Of its own: a transfer that a later order has replaced may be writing a last file.
        folder = versions.root / _FILES / sha256(name.encode()).hexdigest()[:16]
        try:
            wheel = await self._fetch_all(folder, order, release, fetch)
            # Counted only now: an order whose wheels cannot be fetched may be replaced by any later one.
            await in_daemon_thread(lambda: self._pin.accept(release))
            log.info("release accepted", version=release.version, counter=release.counter, op=order.op_id)
            await self._start(name, wheel, folder if order.packages else None)
        except CorralError as error:
            log.warning("release not installed", op=order.op_id, reason=error.message)
            fetch.error = error
        except Exception as error:
            log.exception("release not installed", op=order.op_id)
            fetch.error = Failed(f"the worker failed: {error!r}")

    async def _fetch_all(self, folder: Path, order: UpgradeWorker, release: ReleaseOrder, fetch: _Fetch) -> Path:
        if len(order.packages) > MAX_PACKAGES or not 0 < release.size_bytes <= MAX_WHEEL_BYTES:
            raise Invalid("the order names too many packages, or a wheel that is too large")
        await in_daemon_thread(lambda: _make_empty(folder))
        own = ReleasePackage(f"corral-{release.version}-py3-none-any.whl", release.sha256, release.size_bytes)
        wheel = await self._fetch(folder, own, order, fetch)
        read = await in_daemon_thread(lambda: read_wheel(wheel))
        if read.version != release.version:
            raise Invalid(f"the wheel is of version {read.version}, and {release.version} was signed")
        hashes = frozenset(_HASH.findall(read.pinned))
        for package in order.packages:
            if package.sha256 not in hashes:
                raise Invalid(f"{package.name} is not among the packages that the wheel names")
            await self._fetch(folder, package, order, fetch)
        return wheel

    async def _fetch(self, folder: Path, package: ReleasePackage, order: UpgradeWorker, fetch: _Fetch) -> Path:
        if not _NAME.match(package.name) or not 0 < package.size_bytes <= MAX_PACKAGE_BYTES:
            raise Invalid(f"the order names a package {package.name[:100]!r} of {package.size_bytes} bytes")
        wanted = ExpectedBlob(PREFIX + package.sha256, package.size_bytes)
        before = fetch.current_bytes

        def on_progress(progress: Progress) -> None:
            fetch.current_bytes = before + progress.current_bytes

        with self._store.hold(wanted.digest):
            try:
                blob = await self._fleet.obtain(
                    self._store, wanted, order.sources, order.source_token, on_progress, name=package.name
                )
            except WrongDigest as error:
                raise Invalid(error.message) from error
            await in_daemon_thread(lambda: _copy(blob.path, folder / package.name))
        fetch.current_bytes = before + package.size_bytes
        return folder / package.name

    async def _start(self, name: str, wheel: Path, packages: Path | None) -> None:
        words = [str(self._data), str(wheel), str(packages) if packages is not None else "", name]
        words.append(str(self._settings.upgrade_timeout_s))
        python = str(self._program / "bin" / "python")
        command = [python, "-I", "-m", _MODULE, *words]
        ended = asyncio.ensure_future(in_daemon_thread(lambda: _run_detached(command), name="upgrade"))
        while not ended.done():
            found = read_trial(self._data)
            if found is not None and found.order == name and await in_daemon_thread(self._is_busy):
                return
            await asyncio.wait([ended], timeout=_POLL_S)
        found = read_trial(self._data)
        if found is None or found.order != name or not found.has_ended:
            raise Failed(f"the upgrade ended with status {await ended}: see the log of the worker")

    def _is_busy(self) -> bool:
        return is_upgrading(self._require_versions())

    def _stop_build(self, operation: str) -> bool:
        """End the process that builds or checks for this operation. Blocking."""
        trial = read_trial(self._data)
        if trial is None or _operation_of(trial.order) != operation:
            return False
        if trial.state not in (TrialState.BUILDING, TrialState.CHECKING):
            return False
        stopped = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if _MODULE in words and trial.order in words and str(self._data) in words:
                    process.send_signal(signal.SIGTERM)
                    stopped = True
        return stopped

    def _require_versions(self) -> Versions:
        assert self._versions is not None
        return self._versions


def _run_detached(command: list[str]) -> int:
    """Its group is its own: a signal for this worker is none for the process that watches its successor. It goes on
    when this worker ends."""
    env = environment_without_secrets(os.environ)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env, start_new_session=True).wait()


def _operation_of(name: str) -> str:
    return name.rpartition(":")[0]


def _reply(state: UpgradeState, reason: str = "", *, is_final: bool = False) -> UpgradeWorkerReply:
    return UpgradeWorkerReply(state=state, reason=reason, version=__version__, is_final=is_final)


def _reply_of(trial: Trial) -> UpgradeWorkerReply:
    match trial.state:
        case TrialState.DONE:
            return _reply(UpgradeState.DONE)
        case TrialState.REJECTED:
            return UpgradeWorkerReply(
                state=UpgradeState.FAILED,
                reason=trial.reason,
                version=__version__,
                is_final=trial.is_final,
                is_version_bad=trial.is_final,
            )
        case TrialState.RETURNED | TrialState.FAILED:
            back = "the old version serves again"
            reason = f"{trial.reason}; {back if trial.state is TrialState.RETURNED else 'the old version is not ready'}"
            return UpgradeWorkerReply(
                state=UpgradeState.FAILED, reason=reason, version=__version__, is_final=True, is_version_bad=True
            )
        case _:
            return UpgradeWorkerReply(state=UpgradeState.RUNNING, phase=trial.state.value, version=__version__)


def _make_empty(folder: Path) -> None:
    try:
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise Failed(f"{folder} cannot be written: {error.strerror or error}") from error


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise Failed(f"{target} cannot be written: {error.strerror or error}") from error
