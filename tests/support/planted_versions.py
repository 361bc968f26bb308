"""Versions of Corral in a folder as the installer of the join line makes it, without the package index: the packages of
the tests' own environment serve all of them."""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from corral.controller.distribution.own_wheel import OwnWheel, pack_own_wheel
from corral.worker.upgrade.versions import COMPLETE, Versions

_SCRIPT = "#!{python}\nimport sys\nfrom corral.cli.main import main\nsys.exit(main())\n"


@cache
def own_wheel() -> OwnWheel:
    return pack_own_wheel()


def write_wheel(path: Path, edits: Mapping[str, str], version: str = "") -> Path:
    """Our own wheel with lines added at the end of files; `version` replaces its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = own_wheel()
    with zipfile.ZipFile(io.BytesIO(own.data)) as before, zipfile.ZipFile(path, "w") as after:
        for info in before.infolist():
            data = before.read(info)
            if version and info.filename == "corral/__init__.py":
                data = data.replace(f'"{own.version}"'.encode(), f'"{version}"'.encode())
            if version and info.filename.endswith(".dist-info/METADATA"):
                data = data.replace(f"\nVersion: {own.version}\n".encode(), f"\nVersion: {version}\n".encode())
            after.writestr(info, data + edits.get(info.filename, "").encode())
    return path


def plant_version(versions: Versions, wheel: Path, sha256: str) -> Path:
    """Install the wheel. What `build` does, in a second."""
    folder = versions.folder(sha256)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    script = folder / "bin" / "corral"
    script.write_text(_SCRIPT.format(python=folder / "bin" / "python"))
    script.chmod(0o755)
    (folder / COMPLETE).touch()
    return folder
