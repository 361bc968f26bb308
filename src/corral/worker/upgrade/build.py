"""Builds the environment of another version of Corral beside the one that runs, from its wheel.

The wheel contains the list of its dependencies with their hashes; uv or pip install exactly those, binary only. A build
that is interrupted has no `.complete`, and the next one removes it.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from corral.kit.errors import Failed, Invalid
from corral.kit.log import get_log
from corral.kit.subprocesses import capture_blocking, environment_without_secrets
from corral.worker.upgrade.versions import COMPLETE, Versions, is_complete

log = get_log(__name__)

LOCKS = ("corral/_requirements.txt", "corral/_pip.txt")
NEEDED_BYTES = 400 << 20
_INSTALL_S = 900.0
_START_S = 60.0


@dataclass(frozen=True)
class CorralWheel:
    """A wheel of Corral that has its list of dependencies."""

    path: Path
    sha256: str
    version: str
    pinned: str


def read_wheel(path: Path) -> CorralWheel:
    """Raises Invalid for a file that is none."""
    try:
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            fields = HeaderParser().parsestr(archive.read(metadata).decode())
            pinned = "".join(archive.read(each).decode() for each in LOCKS)
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror}") from error
    except (zipfile.BadZipFile, StopIteration, KeyError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} is no wheel of Corral, or is damaged") from error
    if fields.get("Name") != "corral" or not fields.get("Version"):
        raise Invalid(f"{path} is a wheel of {fields.get('Name')}, not of Corral")
    return CorralWheel(path, hashlib.sha256(data).hexdigest(), str(fields["Version"]), pinned)


def build(versions: Versions, wheel: CorralWheel, *, packages: Path | None, env: Mapping[str, str]) -> Path:
    """The folder of the version, complete. `packages`: a folder with the wheels of the dependencies; None: the package
    index has them. Blocking. Raises Failed, and leaves nothing behind then."""
    folder = versions.folder(wheel.sha256)
    if is_complete(folder):
        return folder
    _check_space(versions.root)
    shutil.rmtree(folder, ignore_errors=True)  # of a build that was interrupted
    try:
        _install(folder, wheel, packages, environment_without_secrets(env))
        (folder / COMPLETE).touch()
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise Failed(_explain(error, folder)) from error
        raise
    return folder


def _check_space(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < NEEDED_BYTES:
        raise Failed(f"{root} has {free >> 20} MiB of free space, {NEEDED_BYTES >> 20} MiB are needed: free some")


def _explain(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"the disk is full: free some space in {folder.parent}"
    return f"{folder} cannot be written: {error.strerror or error}"


def _install(folder: Path, wheel: CorralWheel, packages: Path | None, env: Mapping[str, str]) -> None:
    uv = shutil.which("uv", path=env.get("PATH"))
    base = getattr(sys, "_base_executable", sys.executable)  # not the environment that will be removed one day
    _run([base, "-m", "venv", *(("--without-pip",) if uv else ()), str(folder)], env, "cannot make an environment")
    python = str(folder / "bin" / "python")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"corral @ {wheel.path.resolve().as_uri()} --hash=sha256:{wheel.sha256}\n{wheel.pinned}")
    words = ["--require-hashes", "--only-binary", ":all:", "-r", str(requirements)]
    if packages is not None:
        words = ["--no-index", "--find-links", str(packages), *words]
    if uv:
        command = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python, *words]
    else:
        command = [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", *words]
    _run(command, env, "the packages could not be installed", timeout_s=_INSTALL_S)
    requirements.unlink()
    found = _run([str(folder / "bin" / "corral"), "--version"], env, "the new version does not start")
    if wheel.version not in found:
        raise Failed(f"the new version calls itself {found.strip()[:100]!r}, its wheel is of {wheel.version}")


def _run(command: Sequence[str], env: Mapping[str, str], what: str, *, timeout_s: float = _START_S) -> str:
    try:
        ran = capture_blocking(command, env=env, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"{what}: it did not end within {timeout_s:g} s") from None
    if ran.status != 0:
        lines = [line for line in (ran.stderr or ran.stdout).splitlines() if line.strip()]
        reason = "; ".join(lines[-3:])[:500] or f"exit status {ran.status}"
        if "No space left on device" in ran.stderr:
            reason = "the disk is full"
        raise Failed(f"{what}: {reason}")
    return ran.stdout
