"""The wheel of the Corral that runs here, so that a machine that joins gets exactly this version.

An installed package is packed again from its RECORD, every file checked against its hash; a checkout is packed from
its source. The bytes depend on the content alone: controllers of one version make the same wheel. Everything here
blocks.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any

import corral
from corral.kit.errors import Failed

LOCK_FILE = "corral/_requirements.txt"  # in the wheel: the dependencies with their hashes (pyproject.toml)
PIP_FILE = "corral/_pip.txt"  # the same for pip, with which a machine installs them
_PACKAGE = "corral"
_ROOT = Path(corral.__file__).parents[2]
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time a zip archive can hold
_TAG = "py3-none-any"


@dataclass(frozen=True)
class OwnWheel:
    name: str
    version: str
    data: bytes
    sha256: str

    def read(self, path: str) -> str:
        """A text file of the wheel."""
        with zipfile.ZipFile(io.BytesIO(self.data)) as archive:
            return archive.read(path).decode()


def pack_own_wheel() -> OwnWheel:
    """Raises Failed where the installed package or the checkout is damaged."""
    installed = _find_installed()
    try:
        files = _installed_files(installed) if installed is not None else _checkout_files(_ROOT)
    except OSError as error:
        raise Failed(f"{error.filename} cannot be read: install Corral again to serve it to other machines") from error
    return _pack(files, corral.__version__)


def _find_installed() -> Distribution | None:
    """None in a checkout, also where it is installed in editable mode."""
    try:
        found = distribution(_PACKAGE)
    except PackageNotFoundError:
        return None
    is_here = any(str(each) == "corral/__init__.py" for each in found.files or ())
    return found if is_here else None


def _installed_files(installed: Distribution) -> dict[str, bytes]:
    """The package and its metadata, without what an installer adds (launchers, compiled code)."""
    files: dict[str, bytes] = {}
    for entry in installed.files or ():
        path = entry.as_posix()
        top = entry.parts[0]
        if entry.hash is None or not (top == _PACKAGE or (top.endswith(".dist-info") and _is_of_the_wheel(entry))):
            continue
        data = Path(str(installed.locate_file(entry))).read_bytes()
        if entry.hash.mode != "sha256" or _record_hash(data) != entry.hash.value:
            raise Failed(f"the installed file {path} was changed: install Corral again to serve it to other machines")
        files[path] = data
    return files


def _is_of_the_wheel(entry: PurePosixPath) -> bool:
    """Installers add files of their own to the metadata, some with the time of the installation."""
    return entry.name in ("METADATA", "WHEEL", "entry_points.txt") or "licenses" in entry.parts


def _checkout_files(root: Path) -> dict[str, bytes]:
    project: Mapping[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    folder = f"{_PACKAGE}-{corral.__version__}.dist-info"
    files = dict(_tree(root / "src" / _PACKAGE, _PACKAGE)) | dict(_tree(root / "backends", f"{_PACKAGE}/_backends"))
    files[LOCK_FILE] = (root / "requirements" / "runtime.txt").read_bytes()
    files[PIP_FILE] = (root / "requirements" / "pip.txt").read_bytes()
    files[f"{folder}/METADATA"] = _metadata(project).encode()
    files[f"{folder}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: corral\nRoot-Is-Purelib: true\nTag: {_TAG}\n".encode()
    scripts = "".join(f"{name} = {target}\n" for name, target in project["scripts"].items())
    files[f"{folder}/entry_points.txt"] = f"[console_scripts]\n{scripts}".encode()
    files[f"{folder}/licenses/LICENSE"] = (root / "LICENSE").read_bytes()
    return files


def _tree(folder: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            yield "/".join((prefix, *parts)), path.read_bytes()


def _metadata(project: Mapping[str, Any]) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {corral.__version__}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {each}" for each in project["dependencies"]),
    ]
    return "\n".join(lines) + "\n"


def _pack(files: Mapping[str, bytes], version: str) -> OwnWheel:
    """Without compression: its result would depend on the version of zlib."""
    record_path = f"{_PACKAGE}-{version}.dist-info/RECORD"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(files):
            _add(archive, path, files[path])
        _add(archive, record_path, _record(files, record_path))
    data = buffer.getvalue()
    name = f"{_PACKAGE}-{version}-{_TAG}.whl"
    return OwnWheel(name, version, data, hashlib.sha256(data).hexdigest())


def _add(archive: zipfile.ZipFile, path: str, data: bytes) -> None:
    info = zipfile.ZipInfo(path, _EPOCH)
    # Scripts of backends are run by their path; all other files are read.
    info.external_attr = (0o100755 if data.startswith(b"#!") else 0o100644) << 16
    archive.writestr(info, data)


def _record(files: Mapping[str, bytes], own_path: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for path in sorted(files):
        writer.writerow((path, f"sha256={_record_hash(files[path])}", len(files[path])))
    writer.writerow((own_path, "", ""))
    return text.getvalue().encode()


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
