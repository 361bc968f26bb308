"""Which files of a data folder belong to a backup, by their names below it.

Not here: model files, backends and logs, which are large and come again; server certificates, which `corral up` issues
again; the worker's token, which is valid once.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from corral.cli.common.data_folder import DataFolder
from corral.kit.files import read_text
from corral.kit.redact import redact_url_bytes

STORE = "store.db"  # the dump of the database
_DATA = "data"  # the folder of files in the archive
_SECRETS = (
    *("secrets/admin.key", "secrets/gateway.key", "secrets/ca.crt", "secrets/ca.key", "secrets/bus/*"),
    *("controller/admin.key", "controller/gateway.key"),  # of a controller without `corral up`
    *("worker/identity.json", "worker/ingress.key", "worker/ingress.crt"),
)
_PLAIN = (
    "ports.json",
    *(f"controller/{folder}/*.{suffix}" for folder in ("models", "galleries") for suffix in ("yaml", "yml")),
)
_OF_THE_WORKER = "worker/"
_KEPT = ("ports.json", _OF_THE_WORKER)  # what a folder has already is kept


def read_parts(folder: DataFolder, *, with_secrets: bool) -> dict[str, bytes]:
    """The files by their names in the archive. Without secrets, users and passwords in URLs are stars."""
    patterns = (*_SECRETS, *_PLAIN) if with_secrets else _PLAIN
    found = {}
    for path in _matches(folder.root, patterns):
        content = path.read_bytes()
        found[f"{_DATA}/{path.relative_to(folder.root).as_posix()}"] = (
            content if with_secrets else redact_url_bytes(content)
        )
    return found


def secret_files(folder: DataFolder) -> list[Path]:
    return list(_matches(folder.root, _SECRETS))


def _matches(root: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and not path.name.startswith("."):
                yield path


def is_known(name: str) -> bool:
    """Whether a restore has a place for this member."""
    return name == STORE or any(_has_form(name, f"{_DATA}/{each}") for each in (*_SECRETS, *_PLAIN))


def _has_form(name: str, pattern: str) -> bool:
    parts, forms = name.split("/"), pattern.split("/")
    return len(parts) == len(forms) and all(map(fnmatchcase, parts, forms))


def place_of(name: str) -> str:
    """Where a member of the archive belongs, below the data folder."""
    return name.removeprefix(f"{_DATA}/")


def is_of_worker(place: str) -> bool:
    return place.startswith(_OF_THE_WORKER)


def is_kept(place: str) -> bool:
    """Whether a file that is there already stays, without being a reason to refuse the restore."""
    return place.startswith(_KEPT)


def machine_id() -> str:
    """A hash that is the same for backups of this machine; the id itself is not for other programs' files."""
    text = read_text(Path("/etc/machine-id")) or ""
    return hashlib.sha256(f"corral backup {text} {socket.gethostname()}".encode()).hexdigest()[:32]
