"""The wheel that a controller serves of itself."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from corral import __version__
from corral.controller.distribution.own_wheel import LOCK_FILE, PIP_FILE, OwnWheel, pack_own_wheel

ROOT = Path(__file__).parents[3]
PACK = "from corral.controller.distribution.own_wheel import pack_own_wheel; print(pack_own_wheel().sha256)"


@pytest.fixture(scope="module")
def wheel() -> OwnWheel:
    return pack_own_wheel()


def entries(wheel: OwnWheel) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(wheel.data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack_installed(folder: Path) -> subprocess.CompletedProcess[str]:
    """Pack the package that is installed in a folder, without this checkout on the path."""
    path = f"import sys; sys.path[:0] = [{str(folder)!r}, {sysconfig.get_path('purelib')!r}]; "
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", path + PACK], capture_output=True, text=True, timeout=50, check=False
    )


def test_it_has_a_complete_record(wheel: OwnWheel) -> None:
    files = entries(wheel)
    own = f"corral-{__version__}.dist-info/RECORD"
    rows = {path: (digest, size) for path, digest, size in csv.reader(io.StringIO(files[own].decode()))}
    assert rows.keys() == files.keys()
    assert rows.pop(own) == ("", "")
    for path, (digest, size) in rows.items():
        found = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={found}", len(files[path])), path


def test_it_has_all_that_a_machine_needs_and_nothing_else(wheel: OwnWheel) -> None:
    files = entries(wheel)
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "corral").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert source <= files.keys()
    assert {name.split("/")[0] for name in files} == {"corral", f"corral-{__version__}.dist-info"}
    assert not [name for name in files if name.endswith(".pyc")]
    assert files["corral/_backends/mock/mock.py"] == (ROOT / "backends" / "mock" / "mock.py").read_bytes()
    assert wheel.read(LOCK_FILE) == (ROOT / "requirements" / "runtime.txt").read_text()
    assert wheel.read(PIP_FILE) == (ROOT / "requirements" / "pip.txt").read_text()
    assert "corral = corral.cli.main:main" in wheel.read(f"corral-{__version__}.dist-info/entry_points.txt")
    assert wheel.name == f"corral-{__version__}-py3-none-any.whl"


def test_the_same_source_gives_the_same_bytes(wheel: OwnWheel) -> None:
    assert pack_own_wheel() == wheel


def test_an_installed_package_is_packed_to_the_same_bytes(wheel: OwnWheel, tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(wheel.data)) as archive:
        archive.extractall(tmp_path)
    packed = pack_installed(tmp_path)
    assert packed.stdout.strip() == wheel.sha256, packed.stderr


@pytest.mark.parametrize("name", ["INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"])
def test_what_an_installer_adds_changes_no_byte(wheel: OwnWheel, tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(io.BytesIO(wheel.data)) as archive:
        archive.extractall(tmp_path)
    metadata = f"corral-{__version__}.dist-info"
    (tmp_path / metadata / name).write_bytes(b"added")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"added").digest()).rstrip(b"=").decode()
    with (tmp_path / metadata / "RECORD").open("a") as record:
        record.write(f"{metadata}/{name},sha256={digest},5\n")
    packed = pack_installed(tmp_path)
    assert packed.stdout.strip() == wheel.sha256, packed.stderr


def test_a_changed_file_is_not_given_to_other_machines(wheel: OwnWheel, tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(wheel.data)) as archive:
        archive.extractall(tmp_path)
    changed = tmp_path / "corral" / "kit" / "clock.py"
    changed.write_text(changed.read_text() + "# changed\n")
    packed = pack_installed(tmp_path)
    assert packed.returncode != 0
    assert "corral/kit/clock.py was changed: install Corral again" in packed.stderr


def test_every_package_that_is_installed_has_a_hash(wheel: OwnWheel) -> None:
    for text in (wheel.read(LOCK_FILE), wheel.read(PIP_FILE)):
        for block in text.replace("\\\n", " ").splitlines():
            assert "--hash=sha256:" in block, block
