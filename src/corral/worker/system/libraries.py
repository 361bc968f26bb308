"""Shared libraries that backends need from the system: which of them this machine lacks, and how to get them.

A build contains most of its libraries; its manifest names the others (`needs`). The worker checks them before it
installs a backend and before it starts a process. As root on Debian it installs the packages (`packages.py`);
elsewhere the error names the command to run.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from corral.contract.manifest import Needs, check_needs
from corral.contract.messages.backends import TO_FIX
from corral.kit.errors import CorralError, Failed
from corral.kit.log import get_log
from corral.kit.subprocesses import capture_blocking
from corral.worker.system.packages import PackageManager

log = get_log(__name__)

LINKER_CACHE = Path("/etc/ld.so.cache")
PROBE_TIMEOUT_S = 20.0

# Loading a library runs its code, so a process of its own does that. It prints the libraries that cannot be loaded.
_PROBE = """
import ctypes, sys
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError:
        print(name)
"""

# "error while loading shared libraries: libfoo.so.1: cannot open shared object file: No such file or directory" is the
# linker's, "ImportError: libfoo.so.1: cannot open …" Python's, and engines put words of their own around either.
_CANNOT_OPEN = re.compile(r"(?<![\w./+-])([A-Za-z0-9_+.-]+\.so(?:\.[0-9]+)*): cannot open shared object file")

# Libraries that backends lacked on minimal machines, for builds that declare nothing.
_DEBIAN_PACKAGES = {
    "libgomp.so.1": "libgomp1",
    "libatomic.so.1": "libatomic1",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
    "libgfortran.so.5": "libgfortran5",
    "libquadmath.so.0": "libquadmath0",
    "libopenblas.so.0": "libopenblas0",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libssl.so.3": "libssl3",
    "libcrypto.so.3": "libssl3",
    "libz.so.1": "zlib1g",
    "libvulkan.so.1": "libvulkan1",
    "libGL.so.1": "libgl1",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgthread-2.0.so.0": "libglib2.0-0",
    "libsndfile.so.1": "libsndfile1",
    "libespeak-ng.so.1": "libespeak-ng1",
    "libOpenCL.so.1": "ocl-icd-libopencl1",
    "libze_loader.so.1": "libze1",
}


class MissingLibraries(Failed):
    """The machine lacks libraries that a backend needs. `permanent`: waiting does not change that."""

    code = "missing_libraries"

    def __init__(self, message: str, libraries: tuple[str, ...], *, permanent: bool = True) -> None:
        super().__init__(message)
        self.libraries = libraries
        self.permanent = permanent


def libraries_named_in(lines: Iterable[str]) -> tuple[str, ...]:
    """The libraries that a process could not open, according to its output."""
    return tuple(dict.fromkeys(library for line in lines for library in _CANNOT_OPEN.findall(line)))


def explain_missing(
    backend: str, libraries: Collection[str], packages: Collection[str], manager: PackageManager, why: str = ""
) -> str:
    """One sentence, and after the arrow the command. `why`: the result of the worker's own attempt."""
    sentence = f"{backend} needs {', '.join(libraries)}, which this machine lacks"
    return f"{sentence}{f' ({why})' if why else ''}{TO_FIX}{manager.command_for(packages, libraries)}"


def packages_for(libraries: Iterable[str], needs: Needs | None) -> tuple[str, ...]:
    """Debian's packages with these libraries: from the manifest, else from our own table."""
    declared = needs is not None and set(libraries) <= set(needs.libraries)
    if declared and needs is not None and needs.debian:
        return needs.debian
    known = (_DEBIAN_PACKAGES.get(library, "") for library in libraries)
    return tuple(dict.fromkeys(package for package in known if package))


def find_missing(libraries: Collection[str]) -> frozenset[str]:
    """The libraries that the linker cannot load on this machine. Blocking. In doubt a library counts as present: an
    install that could succeed must not be refused."""
    if not libraries or not sys.platform.startswith("linux"):
        return frozenset()
    command = (sys.executable, "-I", "-S", "-c", _PROBE, *libraries)
    try:
        ran = capture_blocking(command, timeout_s=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("libraries could not be checked", libraries=", ".join(libraries), error=str(error))
        return frozenset()
    if ran.status != 0:
        log.warning("libraries could not be checked", libraries=", ".join(libraries), status=ran.status)
        return frozenset()
    return frozenset(ran.stdout.split()) & frozenset(libraries)


def is_bundled(library: str, directory: Path) -> bool:
    """Whether the build contains the library: under its own name, or renamed in a wheel's `*.libs` folder. Blocking."""
    stem = library.partition(".so")[0]
    if next(directory.rglob(library), None) is not None:
        return True
    return any(next(folder.glob(f"{stem}-*.so*"), None) is not None for folder in directory.rglob("*.libs"))


class SystemLibraries:
    """The libraries of this machine, cached: every heartbeat reads them."""

    def __init__(
        self,
        manager: PackageManager,
        *,
        find: Callable[[Collection[str]], frozenset[str]] = find_missing,
        linker_cache: Path = LINKER_CACHE,
    ) -> None:
        self.manager = manager
        self._find = find
        self._linker_cache = linker_cache
        self._missing: frozenset[str] = frozenset()
        self._probed: frozenset[str] = frozenset()
        self._signature: tuple[int, int] = (0, 0)

    async def ensure(
        self,
        backend: str,
        needs: Needs | None,
        on_install: Callable[[str], None] = lambda _: None,
        *,
        directory: Path | None = None,
    ) -> None:
        """Return when the libraries are present; as root on Debian install them first, and call `on_install` with the
        command. `directory`: of an unpacked build, which may contain a library. Raises MissingLibraries."""
        if needs is None or not needs.libraries:
            return
        check_needs(needs)
        missing = await self._lacking(needs, directory)
        if not missing:
            return
        packages = packages_for(missing, needs)
        if not packages or not self.manager.can_install():
            why = self.manager.why_not() if packages else ""
            raise MissingLibraries(explain_missing(backend, missing, packages, self.manager, why), missing)
        on_install(self.manager.install_command(packages))
        log.info("system packages are installed", backend=backend, packages=" ".join(packages))
        try:
            await self.manager.install(packages)
        except CorralError as error:
            message = explain_missing(backend, missing, packages, self.manager, error.message)
            raise MissingLibraries(message, missing, permanent=False) from error
        if missing := await self._lacking(needs, directory):
            why = f"{' '.join(packages)} was installed and does not contain it"
            raise MissingLibraries(explain_missing(backend, missing, (), self.manager, why), missing)

    async def refresh(self, libraries: Collection[str]) -> bool:
        """Check these libraries, unless all were present the last time and nothing was installed or removed since.
        Returns whether the result changed."""
        wanted, signature = frozenset(libraries), await asyncio.to_thread(_signature, self._linker_cache)
        if self.has(wanted) and signature == self._signature:
            return False
        before = self._probed - self._missing, self._missing
        self._missing = await asyncio.to_thread(self._find, wanted)
        self._probed, self._signature = wanted, signature
        return before != (self._probed - self._missing, self._missing)

    def has(self, libraries: Iterable[str]) -> bool:
        """Whether the last check found all of these. False before the first check."""
        return set(libraries) <= self._probed - self._missing

    def lacks(self, libraries: Iterable[str]) -> tuple[str, ...]:
        """Those of these libraries that the last check did not find."""
        return tuple(library for library in libraries if library in self._missing)

    async def problem_of(self, backend: str, needs: Needs | None, directory: Path) -> str:
        """For the inventory: empty when the last check found every library of an unpacked build."""
        missing = frozenset(self.lacks(needs.libraries) if needs is not None else ())
        if missing:
            missing = await asyncio.to_thread(_not_bundled, missing, directory)
        if not missing:
            return ""
        return explain_missing(backend, sorted(missing), packages_for(missing, needs), self.manager)

    async def _lacking(self, needs: Needs, directory: Path | None) -> tuple[str, ...]:
        missing = await asyncio.to_thread(self._find, needs.libraries)
        if directory is not None:
            missing = await asyncio.to_thread(_not_bundled, missing, directory)
        return tuple(library for library in needs.libraries if library in missing)


def _not_bundled(libraries: Iterable[str], directory: Path) -> frozenset[str]:
    return frozenset(library for library in libraries if not is_bundled(library, directory))


def _signature(path: Path) -> tuple[int, int]:
    """Changes when `ldconfig` ran, as it does after every change of packages."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_ino)
