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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.gallery.pypi.corral_wheel import read_contents
from corral.kit.errors import Failed, Invalid
from corral.kit.log import get_log
from corral.kit.subprocesses import capture_blocking, environment_without_secrets
from corral.worker.upgrade.versions import COMPLETE, Versions, is_complete

log = get_log(__name__)

NEEDED_BYTES = 400 << 20
_INSTALL_S = 900.0
_START_S = 60.0


class UnusableVersion(Failed):
    """The version itself does not work here: another attempt would fail the same way."""


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
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror}") from error
    found = read_contents(data, str(path))
    return CorralWheel(path, hashlib.sha256(data).hexdigest(), found.version, found.pinned)


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
        cache = ["--no-cache"] if packages is not None else []
        command = [uv, "pip", "install", "--quiet", "--compile-bytecode", *cache, "--python", python, *words]
    else:
        cache = ["--no-cache-dir"] if packages is not None else []
        command = [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", *cache]
        command += words
    _run(command, env, "the packages could not be installed", timeout_s=_INSTALL_S)
    requirements.unlink()
    try:
        found = _run([str(folder / "bin" / "corral"), "--version"], env, "the new version does not start")
    except Failed as error:
        raise UnusableVersion(error.message) from error
    if wheel.version not in found:
        raise UnusableVersion(f"the new version calls itself {found.strip()[:100]!r}, its wheel is of {wheel.version}")


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
