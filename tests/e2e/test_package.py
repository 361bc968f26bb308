"""The wheel and the source archive of `scripts/build`, installed where there is no source, as users install them."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from corral import __version__
from tests.support.fleet import PATIENT, Fleet
from tests.support.processes import clean_env
from tests.support.uv import find_uv

ROOT = Path(__file__).parents[2]
WHEEL = f"corral-{__version__}-py3-none-any.whl"
SDIST = f"corral-{__version__}.tar.gz"
QUESTION = [{"role": "user", "content": "hello from a package"}]
pytestmark = pytest.mark.timeout(400)  # all dependencies come from the package index


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(ROOT / "scripts" / "build", folder)
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder without any source, where every command of a test runs."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    ran = subprocess.run([str(each) for each in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def machine(root: Path) -> dict[str, str]:
    """The environment of a person with an empty home. The versions are the pinned ones: a later release of a
    dependency is no fault of the package."""
    pinned = re.findall(r"^[\w.-]+==[^ \\]+", (ROOT / "requirements" / "runtime.txt").read_text(), re.MULTILINE)
    versions = root / "versions.txt"
    versions.write_text("\n".join(pinned))
    return clean_env(root / "home", PIP_CONSTRAINT=str(versions), UV_CONSTRAINT=str(versions), UV_PYTHON=sys.executable)


@contextmanager
def fleet_of(program: tuple[str | Path, ...], env: dict[str, str], elsewhere: Path) -> Iterator[Fleet]:
    fleet = Fleet(elsewhere.parent, **PATIENT)
    fleet.env = env | {name: value for name, value in fleet.env.items() if name.startswith("CORRAL_")}
    fleet.prefix = ("env", "-C", str(elsewhere))
    fleet.program = tuple(map(str, program))
    try:
        yield fleet.start()
    finally:
        fleet.close()


def chat(fleet: Fleet) -> str:
    """What a model answers: the engine is one of the files of the package."""
    fleet.wait_status(fleet.own_node(), "healthy")
    added = fleet.api("POST", "/api/models", {"definition": {"name": "echo", "backend": "mock"}})
    assert added.status == 201, added.body
    answer = fleet.api("POST", "/v1/chat/completions", {"model": "echo", "messages": QUESTION})
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["message"]["content"])


def tracked(*folders: str) -> set[str]:
    return set(run("git", "ls-files", *folders, cwd=ROOT).splitlines())


def test_the_wheel_has_every_file_of_the_source(built: Path) -> None:
    with zipfile.ZipFile(built / WHEEL) as wheel:
        names = {name for name in wheel.namelist() if name.startswith("corral/")}
    source = {name.removeprefix("src/") for name in tracked("src/corral")}
    backends = {f"corral/_{name}" for name in tracked("backends")}
    assert names == source | backends | {"corral/_requirements.txt", "corral/_pip.txt"}


def test_the_source_archive_makes_the_same_wheel_without_a_checkout(built: Path, tmp_path: Path) -> None:
    with tarfile.open(built / SDIST) as archive:
        archive.extractall(tmp_path, filter="data")
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        tmp_path,
        cwd=tmp_path / f"corral-{__version__}",
    )
    assert (tmp_path / WHEEL).read_bytes() == (built / WHEEL).read_bytes()


def test_uvx_runs_a_fleet_that_answers(built: Path, elsewhere: Path) -> None:
    uvx = (find_uv(), "tool", "run", "--from", built / WHEEL, "corral")
    with fleet_of(uvx, machine(elsewhere.parent), elsewhere) as fleet:
        assert "hello from a package" in chat(fleet)
        assert fleet.http("GET", "/static/corral.css").status == 200, "the page is in the package"


def test_a_tool_that_uv_installed_serves_the_wheel_that_it_came_from(built: Path, elsewhere: Path) -> None:
    env = machine(elsewhere.parent)
    run(find_uv(), "tool", "install", built / WHEEL, cwd=elsewhere, env=env)
    home = elsewhere.parent / "home"
    assert run(home / ".local" / "bin" / "corral", "--version", cwd=elsewhere, env=env) == f"corral {__version__}\n"
    python = home / ".local" / "share" / "uv" / "tools" / "corral" / "bin" / "python"
    served = elsewhere / "served.whl"
    program = (
        "import sys; from corral.controller.distribution.own_wheel import pack_own_wheel; "
        "from pathlib import Path; Path(sys.argv[1]).write_bytes(pack_own_wheel().data)"
    )
    run(python, "-I", "-c", program, served, cwd=elsewhere, env=env)
    assert contents(served.read_bytes()) == contents((built / WHEEL).read_bytes())


def contents(wheel: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.mark.long
def test_pip_installs_a_fleet_that_answers(built: Path, elsewhere: Path) -> None:
    env = machine(elsewhere.parent)
    venv = elsewhere.parent / "venv"
    run(sys.executable, "-m", "venv", venv)
    run(venv / "bin" / "pip", "install", "--quiet", built / WHEEL, cwd=elsewhere, env=env)
    with fleet_of((venv / "bin" / "corral",), env, elsewhere) as fleet:
        assert "hello from a package" in chat(fleet)
