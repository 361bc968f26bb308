"""Locks with `uv pip compile`, which resolves for other machines and knows the hash of every file."""

from __future__ import annotations

import re
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag

from corral.contract.sources import Wheel, normal_name
from corral.gallery.pypi.lock import Lock, NoWheels, lock_of
from corral.gallery.pypi.wheel_tags import MINIMUM_SYSTEM, MinimumSystem, choose_wheel, supported_tags
from corral.kit.errors import CorralError, Failed, NotFound, Unreachable
from corral.kit.subprocesses import CapturedOutput, capture_program, environment_without_secrets

_NO_SOLUTION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
_MACS = {"darwin/amd64": "x86_64-apple-darwin", "darwin/arm64": "aarch64-apple-darwin"}


class UvLocker:
    """uv's own configuration selects the index: environment, uv.toml of user or system, netrc."""

    def __init__(
        self,
        program: str,
        *,
        env: Mapping[str, str],
        minimum: MinimumSystem = MINIMUM_SYSTEM,
        timeout_s: float = 300.0,
        cache_folder: Path | None = None,
        alone: bool = False,
    ) -> None:
        """`alone`: without the package's dependencies, for callers that only need a file of the package."""
        self._program = program
        self._alone = alone
        self._env = environment_without_secrets(env) | {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
        self._minimum = minimum
        self._timeout_s = timeout_s
        if cache_folder is not None:
            self._env["UV_CACHE_DIR"] = str(cache_folder)

    async def lock(self, requirement: str, *, platform: str, python: str) -> Lock:
        wheels = await self._compile(requirement, requirement, platform, python, alone=self._alone)
        return lock_of(requirement, python, wheels)

    async def lock_pinned(self, requirements: str, *, platform: str, python: str) -> tuple[Wheel, ...]:
        return await self._compile(requirements, "the list of packages", platform, python, alone=True)

    async def _compile(
        self, requirements: str, shown: str, platform: str, python: str, *, alone: bool
    ) -> tuple[Wheel, ...]:
        """`shown`: what errors call the requirements."""
        ranks = supported_tags(platform, python, self._minimum)
        # In an empty folder: uv reads the settings of a project in the current folder.
        with tempfile.TemporaryDirectory(prefix="corral-lock-") as folder:
            command = [
                *(self._program, "pip", "compile", "-", "--quiet", "--no-header", "--format", "pylock.toml"),
                *("--only-binary", ":all:", "--python", sys.executable, "--python-version", python),
                *("--python-platform", uv_platform(platform, self._minimum), *(("--no-deps",) if alone else ())),
            ]
            ran = await capture_program(
                command, env=self._env, folder=Path(folder), timeout_s=self._timeout_s, stdin=requirements + "\n"
            )
        if ran.status != 0:
            raise explain(shown, platform, python, ran)
        return read_wheels(ran.stdout, ranks)


def uv_platform(platform: str, minimum: MinimumSystem) -> str:
    """uv's name for os/arch; `supported_tags` has refused other platforms."""
    if platform in _MACS:
        return _MACS[platform]
    return f"{_MACHINES[platform]}-manylinux_{minimum.glibc[0]}_{minimum.glibc[1]}"


def read_pylock(text: str, requirement: str, python: str, ranks: Mapping[Tag, int]) -> Lock:
    return lock_of(requirement, python, read_wheels(text, ranks))


def read_wheels(text: str, ranks: Mapping[Tag, int]) -> tuple[Wheel, ...]:
    """Read a PEP 751 lock made for one machine: the best wheel of each package."""
    try:
        packages = tomllib.loads(text).get("packages", [])
    except tomllib.TOMLDecodeError as error:
        raise Failed(f"uv's lock cannot be read: {error}") from error
    return tuple(sorted((_best(package, ranks) for package in packages), key=lambda wheel: wheel.project))


def explain(requirement: str, platform: str, python: str, ran: CapturedOutput) -> CorralError:
    """Translate uv's output into one of our errors."""
    output = " ".join(ran.stderr.split())
    if ran.status != _NO_SOLUTION:
        return Unreachable(f"{requirement} could not be resolved: {output[:500]}")
    if "wheels" in output:
        return NoWheels(f"{requirement} has no wheels for {platform} and Python {python}: {_cause(output)}")
    return NotFound(f"{requirement} was not found: {_cause(output)}")


def _cause(output: str) -> str:
    found = re.search(r"[Bb]ecause (.*?)(?:, we can conclude|\. |$)", output)
    return (found[1] if found is not None else output)[:300]


def _best(package: Mapping[str, Any], ranks: Mapping[Tag, int]) -> Wheel:
    name, version = normal_name(str(package.get("name", ""))), str(package.get("version", ""))
    found = choose_wheel((_wheel(name, version, each) for each in package.get("wheels", ())), ranks)
    if found is None:
        raise NoWheels(f"{name} {version} has no wheel for this machine")
    if urlsplit(found.url).scheme not in ("http", "https"):
        raise Failed(f"{found.name} is a file of the controller ({found.url[:200]}), which nodes cannot fetch")
    if not _SHA256.match(found.sha256):
        raise Failed(f"the package index has no sha256 for {found.name}")
    return found


def _wheel(project: str, version: str, written: Mapping[str, Any]) -> Wheel:
    url = str(written.get("url") or written.get("path") or "")
    name = str(written.get("name") or unquote(urlsplit(url).path.rpartition("/")[2]))
    size, hashes = written.get("size"), written.get("hashes", {})
    return Wheel(name, url, str(hashes.get("sha256", "")), size if isinstance(size, int) else 0, project, version)
