"""Locks with `pip install --dry-run --report`, if there is no uv. Only for machines like this one: pip evaluates the
markers of dependencies for the system it runs on, so a lock for another system would silently be wrong."""

from __future__ import annotations

import platform as host
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from corral.contract.sources import Wheel, normal_name
from corral.gallery.pypi.lock import Lock, NoWheels, lock_of
from corral.kit.errors import CorralError, Failed, NotFound, Unreachable
from corral.kit.subprocesses import CapturedOutput, capture_program, environment_without_secrets

_ARCHES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_FOREIGN = "without uv the controller can lock wheels only for machines like its own: install uv there"


class PipLocker:
    def __init__(
        self, program: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 600.0, alone: bool = False
    ) -> None:
        """`alone`: without the package's dependencies."""
        self._program = tuple(program)
        self._alone = alone
        self._env = environment_without_secrets(env)
        self._timeout_s = timeout_s

    async def lock(self, requirement: str, *, platform: str, python: str) -> Lock:
        wheels = await self._resolve(requirement, (requirement,), platform, python, alone=self._alone)
        return lock_of(requirement, python, wheels)

    async def lock_pinned(self, requirements: str, *, platform: str, python: str) -> tuple[Wheel, ...]:
        with tempfile.NamedTemporaryFile("w", prefix="corral-lock-", suffix=".txt") as file:
            file.write(requirements)
            file.flush()
            return await self._resolve("the list of packages", ("-r", file.name), platform, python, alone=True)

    async def _resolve(
        self, shown: str, words: Sequence[str], platform: str, python: str, *, alone: bool
    ) -> tuple[Wheel, ...]:
        """`shown`: what errors call the requirements."""
        if (platform, python) != (own_platform(), own_python()):
            raise Failed(f"{shown} for {platform} and Python {python}: {_FOREIGN}")
        with tempfile.TemporaryDirectory(prefix="corral-lock-") as folder:
            report = Path(folder) / "report.json"
            command = [
                *(*self._program, "install", "--dry-run", "--ignore-installed", "--quiet", "--no-input"),
                *("--disable-pip-version-check", "--only-binary", ":all:", *(("--no-deps",) if alone else ())),
                *("--report", str(report), *words),
            ]
            ran = await capture_program(command, env=self._env, folder=Path(folder), timeout_s=self._timeout_s)
            if ran.status != 0:
                raise explain(shown, platform, ran)
            return read_wheels(report.read_bytes())


def read_report(body: bytes, requirement: str, python: str) -> Lock:
    return lock_of(requirement, python, read_wheels(body))


def read_wheels(body: bytes) -> tuple[Wheel, ...]:
    """Read pip's report, which names exactly one file for each package."""
    try:
        written: Any = msgspec.json.decode(body)
        return tuple(sorted(map(_wheel, written["install"]), key=lambda wheel: wheel.project))
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise Failed(f"pip's report cannot be read: {error!r}") from error


def explain(requirement: str, platform: str, ran: CapturedOutput) -> CorralError:
    output = " ".join(ran.stderr.split())
    if "Connection" in output or "connection" in output or "timed out" in output:
        return Unreachable(f"{requirement} could not be resolved: {output[-500:]}")
    if "No matching distribution" in output and "from versions: none" not in output:
        return NotFound(f"{requirement} was not found: {output[-300:]}")
    if "No matching distribution" in output:
        return NoWheels(f"{requirement} has no wheels for {platform}, or there is no such package: {output[-300:]}")
    return Failed(f"pip could not resolve {requirement}: {output[-500:]}")


def own_platform() -> str:
    os = "darwin" if sys.platform == "darwin" else "linux"
    return f"{os}/{_ARCHES.get(host.machine().lower(), host.machine().lower())}"


def own_python() -> str:
    return sysconfig.get_python_version()


def _wheel(written: Mapping[str, Any]) -> Wheel:
    metadata, download = written["metadata"], written["download_info"]
    hashes = download["archive_info"].get("hashes") or {}
    name = unquote(urlsplit(download["url"]).path.rpartition("/")[2])
    if urlsplit(download["url"]).scheme not in ("http", "https"):
        raise Failed(f"{name} is a file of the controller, which nodes cannot fetch")
    return Wheel(
        name, download["url"], hashes["sha256"], project=normal_name(metadata["name"]), version=metadata["version"]
    )
