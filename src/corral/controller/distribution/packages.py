"""Serves Corral's own wheel and the wheels of its dependencies to machines that join.

The wheels are those of the locked list in the own wheel, chosen for the platform and Python of the machine. The
controller fetches each once, into the store of artifacts; a list is stored as a file, so that later machines need no
package index.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from corral.blobs.digests import PREFIX
from corral.blobs.sources.context import unwrapped_task_group
from corral.blobs.store import BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.contract.codec import Undecodable, decode, encode
from corral.contract.sources import PYPI, Source, Wheel
from corral.controller.artifacts.fetches import ArtifactFetches
from corral.controller.artifacts.listings import Origins, listing_key
from corral.controller.distribution.installer import Installer, install_command, make_installer
from corral.controller.distribution.own_wheel import LOCK_FILE, PIP_FILE, OwnWheel, pack_own_wheel
from corral.gallery.pypi.lock import WheelLocker
from corral.gallery.pypi.wheel_sizes import WheelSizes
from corral.kit.errors import CorralError, Failed, Invalid, NotFound, Unreachable
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks
from corral.kit.threads import run_uncancelled

log = get_log(__name__)

PLATFORMS = ("linux/amd64", "linux/arm64", "darwin/arm64", "darwin/amd64")
MAX_FETCHES = 4  # at a time, of the packages of another version
LIST_WAITS = 30  # of the next each, for the packages of another version
LIST_WAIT_S = 10.0  # a resolver takes longer where the index is slow: the machine asks again
_PYTHON = re.compile(r"3\.[0-9]{1,2}\Z")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_URI = "the dependencies of Corral"


@dataclass
class _Attempt:
    """One try to make a list of wheels."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: CorralError | None = None


class CorralPackages:
    name = "packages for joining machines"

    def __init__(
        self,
        fetches: ArtifactFetches,
        blobs: BlobStore,
        origins: Origins,
        locker: WheelLocker,
        sizes: WheelSizes,
        folder: Path,
        ca_fingerprint: str,
        *,
        find_bundled: Callable[[str, str, str], tuple[Wheel, ...]] = lambda _own, _platform, _python: (),
    ) -> None:
        """`find_bundled`: the wheels that a loaded bundle has, by the hash of the own wheel, platform and Python."""
        self._find_bundled = find_bundled
        self._fetches = fetches
        self._blobs = blobs
        self._origins = origins
        self._locker = locker
        self._sizes = sizes
        self._folder = folder
        self._ca_fingerprint = ca_fingerprint
        self._own: OwnWheel | None = None
        self._installer: Installer | None = None
        self._lock = asyncio.Lock()
        self._lists: KeyedTasks[Path] = KeyedTasks()
        self._attempts: dict[Path, _Attempt] = {}
        self._known: dict[str, Wheel] = {}  # by sha256, of all lists

    async def own(self) -> OwnWheel:
        """Packed once, when it is first needed. Raises Failed."""
        async with self._lock:
            if self._own is None:
                self._own = await run_uncancelled(pack_own_wheel)
            return self._own

    async def installer(self) -> Installer:
        if self._installer is None:
            self._installer = make_installer(await self.own(), self._ca_fingerprint)
        return self._installer

    async def install_command(self, url: str, token: str, pin: str = "") -> str:
        return install_command(url, (await self.installer()).sha256, token, pin)

    async def list_(self, platform: str, python: str, machine: str) -> tuple[Wheel, ...] | None:
        """The wheels of all dependencies for such a machine; the controller begins to fetch them. None while the list
        is being made: ask again. `machine` names who asks. Raises Invalid, NoWheels, Unreachable, Failed."""
        if platform not in PLATFORMS or not _PYTHON.match(python):
            raise Invalid(f"platform is one of {', '.join(PLATFORMS)}, and python a version such as 3.12")
        own = await self.own()
        wheels = await self._find_list(own, platform, python)
        if not wheels:
            return None
        self._known |= {wheel.sha256: wheel for wheel in wheels}
        source = packages_source(platform, python, wheels)
        self._fetches.want(listing_key(source, platform, own.sha256), source, platform, f"install {machine}")
        return wheels

    async def fetch_all(self, release: OwnWheel, platform: str, python: str) -> tuple[Wheel, ...]:
        """The wheels of all dependencies of another version of Corral, when they are on this controller. Raises what
        `list_` raises, and Unreachable when the list takes too long."""
        for _ in range(LIST_WAITS):
            if wheels := await self._find_list(release, platform, python):
                break
        else:
            raise Unreachable(f"the list of packages was not made within {LIST_WAITS * LIST_WAIT_S:g} s")
        turn = asyncio.Semaphore(MAX_FETCHES)

        async def fetch(wheel: Wheel) -> None:
            async with turn:
                await self._obtain(wheel)

        async with unwrapped_task_group() as group:
            for wheel in wheels:
                group.create_task(fetch(wheel))
        return wheels

    async def _find_list(self, own: OwnWheel, platform: str, python: str) -> tuple[Wheel, ...]:
        """Empty while it is being made."""
        path = self._folder / f"{own.sha256[:16]}-{platform.replace('/', '-')}-{python}.json"
        wheels = self._find_bundled(own.sha256, platform, python) or await run_uncancelled(_read_list, path)
        if not wheels:
            await self._wait_for_list(path, own, platform, python)
            wheels = await run_uncancelled(_read_list, path)
        return wheels

    async def _obtain(self, wheel: Wheel) -> Path:
        expected = ExpectedBlob(PREFIX + wheel.sha256, wheel.size)
        with self._blobs.hold(expected.digest):
            return (await self._blobs.obtain(self._origins.url(wheel.url), expected)).path

    async def run(self) -> None:
        async with self._lists:
            await asyncio.Event().wait()

    async def _wait_for_list(self, path: Path, own: OwnWheel, platform: str, python: str) -> None:
        """Make the list, for all that ask, and wait a moment for it. Raises why it cannot be made."""
        attempt = self._attempts.setdefault(path, _Attempt())

        async def make() -> None:
            try:
                await run_uncancelled(_write_list, path, await self._make_list(own, platform, python))
            except CorralError as error:
                attempt.error = error
                log.warning("packages for joining machines cannot be listed", reason=error.message)
            finally:
                self._attempts.pop(path, None)
                attempt.ended.set()

        self._lists.start(path, make, name=f"list packages for {platform}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIST_WAIT_S):
                await attempt.ended.wait()
        if attempt.error is not None:
            raise attempt.error

    async def _make_list(self, own: OwnWheel, platform: str, python: str) -> tuple[Wheel, ...]:
        pinned = await run_uncancelled(lambda: own.read(LOCK_FILE) + own.read(PIP_FILE))
        found = await self._locker.lock_pinned(pinned, platform=platform, python=python)
        hashes = frozenset(_HASH.findall(pinned))
        if foreign := [wheel.name for wheel in found if wheel.sha256 not in hashes]:
            raise Failed(f"the package index has other files than Corral was released with: {', '.join(foreign)[:300]}")
        log.info("packages for joining machines listed", platform=platform, python=python, wheels=len(found))
        return await self._sizes.fill(found)

    async def find(self, sha256: str) -> Path | bytes:
        """A wheel of one of the lists, fetched if necessary. Raises NotFound, and what fetching raises."""
        own = await self.own()
        if sha256 == own.sha256:
            return own.data
        if sha256 not in self._known:
            await run_uncancelled(self._read_all_lists, own)
        wheel = self._known.get(sha256)
        if wheel is None:
            raise NotFound("this is no package of Corral: ask for the list of wheels first")
        return await self._obtain(wheel)

    def _read_all_lists(self, own: OwnWheel) -> None:
        """After a restart. Blocking."""
        for path in sorted(self._folder.glob(f"{own.sha256[:16]}-*.json")):
            self._known |= {wheel.sha256: wheel for wheel in _read_list(path)}


def packages_source(platform: str, python: str, wheels: tuple[Wheel, ...]) -> Source:
    return Source(PYPI, _URI, platform=platform, wheels=wheels, python=python)


def _read_list(path: Path) -> tuple[Wheel, ...]:
    try:
        return decode(Source, path.read_bytes()).wheels
    except (OSError, Undecodable):
        return ()


def _write_list(path: Path, wheels: tuple[Wheel, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, encode(Source(PYPI, _URI, wheels=wheels)))
