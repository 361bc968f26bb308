"""Locks with `uv pip compile`, which resolves for other machines than its own and knows every file's hash."""

from __future__ import annotations

import re
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from corral.contract.sources import Wheel, normal_name
from corral.gallery.pypi.lock import Lock, NoWheels
from corral.gallery.pypi.tags import FLOOR, Floor, supported_tags
from corral.gallery.pypi.wheels import choose_wheel
from corral.kit.errors import CorralError, Failed, NotFound, Unreachable
from corral.kit.subprocesses import CapturedOutput, capture_program, environment_without_secrets

_NO_SOLUTION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
_MACS = {"darwin/amd64": "x86_64-apple-darwin", "darwin/arm64": "aarch64-apple-darwin"}


class UvLocker:
    """Which index it asks is uv's own configuration: environment, uv.toml of user or system, netrc."""

    def __init__(
        self,
        program: str,
        *,
        env: Mapping[str, str],
        floor: Floor = FLOOR,
        timeout_s: float = 300.0,
        cache_folder: Path | None = None,
        alone: bool = False,
    ) -> None:
        """`alone`: the package itself and nothing it needs, for who only wants a file out of it."""
        self._program = program
        self._alone = ("--no-deps",) if alone else ()
        self._env = environment_without_secrets(env) | {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
        self._floor = floor
        self._timeout_s = timeout_s
        if cache_folder is not None:
            self._env["UV_CACHE_DIR"] = str(cache_folder)

    async def lock(self, requirement: str, *, platform: str, python: str) -> Lock:
        ranks = supported_tags(platform, python, self._floor)
        # In an empty folder: uv would take settings from a project it happens to be in.
        with tempfile.TemporaryDirectory(prefix="corral-lock-") as folder:
            words = [
                *(self._program, "pip", "compile", "-", "--quiet", "--no-header", "--format", "pylock.toml"),
                *("--only-binary", ":all:", "--python", sys.executable, "--python-version", python),
                *("--python-platform", uv_platform(platform, self._floor), *self._alone),
            ]
            ran = await capture_program(
                words, env=self._env, folder=Path(folder), timeout_s=self._timeout_s, stdin=requirement + "\n"
            )
        if ran.status != 0:
            raise explain(requirement, platform, python, ran)
        return read_pylock(ran.stdout, requirement, python, ranks)


def uv_platform(platform: str, floor: Floor) -> str:
    """uv's word for os/arch; `supported_tags` has refused what is not here."""
    if platform in _MACS:
        return _MACS[platform]
    return f"{_MACHINES[platform]}-manylinux_{floor.glibc[0]}_{floor.glibc[1]}"


def read_pylock(text: str, requirement: str, python: str, ranks: Mapping[str, int]) -> Lock:
    """A PEP 751 lock made for one machine: every package in it is wanted, of its files the best one."""
    try:
        packages = tomllib.loads(text).get("packages", [])
    except tomllib.TOMLDecodeError as error:
        raise Failed(f"uv's lock cannot be read: {error}") from error
    wheels = tuple(sorted((_best(package, ranks) for package in packages), key=lambda wheel: wheel.project))
    project = normal_name(re.split(r"[\[=]", requirement)[0])
    versions = {wheel.project: wheel.version for wheel in wheels}
    if project not in versions:
        raise Failed(f"uv's lock does not contain {project}")
    return Lock(f"{project}=={versions[project]}", versions[project], python, wheels)


def explain(requirement: str, platform: str, python: str, ran: CapturedOutput) -> CorralError:
    """uv's many words as one of our errors."""
    said = " ".join(ran.stderr.split())
    if ran.status != _NO_SOLUTION:
        return Unreachable(f"{requirement} could not be looked up: {said[:500]}")
    if "wheels" in said:
        return NoWheels(f"{requirement} has no wheels for {platform} and Python {python}: {_because(said)}")
    return NotFound(f"{requirement} cannot be had: {_because(said)}")


def _because(said: str) -> str:
    found = re.search(r"[Bb]ecause (.*?)(?:, we can conclude|\. |$)", said)
    return (found[1] if found is not None else said)[:300]


def _best(package: Mapping[str, Any], ranks: Mapping[str, int]) -> Wheel:
    name, version = normal_name(str(package.get("name", ""))), str(package.get("version", ""))
    found = choose_wheel((_wheel(name, version, each) for each in package.get("wheels", ())), ranks)
    if found is None:
        raise NoWheels(f"{name} {version} has no wheel this machine can use")
    if urlsplit(found.url).scheme not in ("http", "https"):
        raise Failed(f"{found.name} is a file on the controller ({found.url[:200]}), which nodes cannot fetch")
    if not _SHA256.match(found.sha256):
        raise Failed(f"the index gives no sha256 for {found.name}")
    return found


def _wheel(project: str, version: str, written: Mapping[str, Any]) -> Wheel:
    url = str(written.get("url") or written.get("path") or "")
    name = str(written.get("name") or unquote(urlsplit(url).path.rpartition("/")[2]))
    size, hashes = written.get("size"), written.get("hashes", {})
    return Wheel(name, url, str(hashes.get("sha256", "")), size if isinstance(size, int) else 0, project, version)
