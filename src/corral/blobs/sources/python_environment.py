"""Builds a Python environment from locked wheels, in its final place: scripts in it name their interpreter by path.

Installs exactly the given files, each with its hash; no index is queried and nothing is built from source. Uses uv if
it is installed, otherwise Python's venv and pip.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corral.blobs.disk import remove_tree
from corral.blobs.errors import BadArchive, from_os
from corral.contract.sources import Wheel, normal_name
from corral.kit.errors import Failed, Invalid, NotFound
from corral.kit.subprocesses import minimal_environment, run_program
from corral.kit.threads import run_uncancelled

ENVIRONMENT = "venv"
WORK = ".wheels"
_WHEEL = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._]*[A-Za-z0-9])?)-(?P<version>[A-Za-z0-9.!+_]+)"
    r"(?:-[0-9][A-Za-z0-9.]*)?-[A-Za-z0-9._]+-[A-Za-z0-9._]+-[A-Za-z0-9._]+\.whl\Z"
)
_TOOLS = re.compile(r"pip\b|setuptools\b|_distutils_hack\b|pkg_resources\b")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class WheelTools:
    """How environments are built on this machine."""

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    use_uv: bool = True
    timeout_s: float = 1800.0
    quick_timeout_s: float = 60.0


def check_wheels(wheels: Sequence[Wheel]) -> None:
    """Raises Invalid. A wheel's name becomes a file's name, so anything else must be refused."""
    if not wheels:
        raise Invalid("the pypi source has no wheels: they must be locked first")
    for wheel in wheels:
        if not _WHEEL.match(wheel.name):
            raise Invalid(f"{wheel.name[:200]!r} is not the name of a wheel; source packages are not built")
        if not _SHA256.match(wheel.sha256):
            raise Invalid(f"{wheel.name[:200]!r} has no sha256")
    if len({wheel.name for wheel in wheels}) != len(wheels):
        raise Invalid("the list names a wheel twice")


async def build_environment(
    folder: Path, wheels: Sequence[tuple[Wheel, Path]], tools: WheelTools, *, python: str = ""
) -> None:
    """Build `folder/venv` from verified wheels. `python`: the version they were chosen for."""
    interpreter = await find_python(python, tools)
    work = folder / WORK
    try:
        await run_uncancelled(_lay_out, work, wheels)
        await _build(folder / ENVIRONMENT, work, interpreter, tools)
    except OSError as error:
        raise from_os(error, f"building the environment in {folder}") from error
    finally:
        await run_uncancelled(remove_tree, work)


def unpacked_bytes(paths: Iterable[Path]) -> int:
    """Size of these wheels when installed. A wheel that cannot be read counts as 0: installing it will raise."""
    total = 0
    for path in paths:
        with contextlib.suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as wheel:
            total += sum(member.file_size for member in wheel.infolist())
    return total


def written_bytes(folder: Path) -> int:
    """Current size of an environment's packages, without the tools that every environment contains and without compiled
    files: neither is in the wheels. Files may appear and vanish during the call."""
    total = 0
    for packages in (folder / ENVIRONMENT).glob("lib/python*/site-packages"):
        for parent, folders, names in os.walk(packages):
            at_top = parent == str(packages)
            folders[:] = [name for name in folders if name != "__pycache__" and not (at_top and _TOOLS.match(name))]
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(parent, name)).st_size
    return total


async def find_python(version: str, tools: WheelTools) -> str:
    """An interpreter of that version (`3.11`); the one that runs Corral if it is empty. Raises NotFound."""
    own = getattr(sys, "_base_executable", "") or sys.executable
    if version in ("", _own_version()):
        return own
    found = shutil.which(f"python{version}", path=tools.env.get("PATH"))
    if found is None or not await _runs([found, "-c", "import venv"], tools):
        raise NotFound(
            f"the wheels are for Python {version}, but this machine has {_own_version()} and no python{version}"
        )
    return found


def requirements(wheels: Sequence[Wheel]) -> str:
    """The requirements file for uv and pip: exact versions, exact hashes."""
    lines = []
    for wheel in wheels:
        found = _WHEEL.match(wheel.name)
        if found is None:
            raise BadArchive(f"{wheel.name[:200]!r} is not the name of a wheel")
        version = found["version"].replace("_", "-")
        lines.append(f"{normal_name(found['name'])}=={version} --hash=sha256:{wheel.sha256}")
    return "\n".join(sorted(lines)) + "\n"


async def _build(environment: Path, work: Path, interpreter: str, tools: WheelTools) -> None:
    uv = shutil.which("uv", path=tools.env.get("PATH")) if tools.use_uv else None
    if uv is not None and await _runs([uv, "--version"], tools):
        await _build_with_uv(uv, environment, work, interpreter, tools)
    else:
        await _build_with_pip(environment, work, interpreter, tools)


async def _build_with_uv(uv: str, environment: Path, work: Path, interpreter: str, tools: WheelTools) -> None:
    env = minimal_environment(tools.env, UV_NO_CONFIG="1", UV_OFFLINE="1", UV_NO_CACHE="1", UV_NO_PROGRESS="1")
    run = _Runner(env, work, tools.timeout_s)
    await run("making an environment", uv, "venv", "--quiet", "--no-project", "--python", interpreter, str(environment))
    await run(
        "installing wheels",
        *(uv, "pip", "install", "--quiet", "--python", str(environment / "bin" / "python")),
        *("--no-index", "--find-links", str(work), "--no-deps", "--require-hashes", "--link-mode", "copy"),
        *("--compile-bytecode", "--requirement", str(work / "requirements.txt")),
    )


async def _build_with_pip(environment: Path, work: Path, interpreter: str, tools: WheelTools) -> None:
    env = minimal_environment(
        tools.env, PIP_CONFIG_FILE=os.devnull, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1"
    )
    run = _Runner(env, work, tools.timeout_s)
    await run("making an environment", interpreter, "-I", "-m", "venv", str(environment))
    await run(
        "installing wheels",
        *(str(environment / "bin" / "python"), "-I", "-m", "pip", "install", "--quiet", "--no-cache-dir"),
        *("--no-index", "--find-links", str(work), "--no-deps", "--require-hashes", "--only-binary", ":all:"),
        *("--requirement", str(work / "requirements.txt")),
    )


@dataclass(frozen=True)
class _Runner:
    env: Mapping[str, str]
    folder: Path
    timeout_s: float

    async def __call__(self, what: str, *command: str) -> None:
        await run_program(command, env=self.env, folder=self.folder, timeout_s=self.timeout_s, what=what)


async def _runs(command: Sequence[str], tools: WheelTools) -> bool:
    try:
        await run_program(
            command,
            env=minimal_environment(tools.env),
            folder=Path("/"),
            timeout_s=tools.quick_timeout_s,
            what=command[0],
        )
    except (Failed, OSError):
        return False
    return True


def _lay_out(work: Path, wheels: Sequence[tuple[Wheel, Path]]) -> None:
    """Link the verified files under the names that uv and pip expect."""
    work.mkdir()
    for wheel, path in wheels:
        try:
            os.link(path, work / wheel.name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, work / wheel.name)
    (work / "requirements.txt").write_text(requirements([wheel for wheel, _ in wheels]))


def _own_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
