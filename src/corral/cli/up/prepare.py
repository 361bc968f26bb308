"""What must be there before anything starts: folders, secrets, certificates. Safe to do again at every start."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from corral.cli.folder import DataFolder
from corral.cli.output import size
from corral.kit.certificates import Ca, expires_at, make_ca, names_of
from corral.kit.errors import Failed
from corral.kit.files import make_folder, make_private_folder, write_atomically, write_secret
from corral.kit.secrets import API_KEY, new_secret

SERVER_LIFE = timedelta(days=397)  # the longest that every TLS client accepts
RENEW_BEFORE = timedelta(days=30)
LEAST_ROOM = 4 * 1024 * 1024  # what the database's log may take before it is folded in


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """What the file system refuses, as one line that says what to do."""
    try:
        yield
    except OSError as error:
        place = error.filename or folder
        raise Failed(f"{place}: {error.strerror or error}: {_remedy(error, folder)}") from error


def _remedy(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room, or choose another folder with --data"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"it belongs to somebody else; mend its permissions (chown -R {_me()} {folder}) or choose --data"
    if error.errno == errno.EROFS:
        return "choose a folder that can be written with --data"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "there is a file where a folder is needed; choose another with --data"
    return "choose another folder with --data"


def _me() -> str:
    return str(os.getuid())


def make_folders(folder: DataFolder) -> None:
    make_folder(folder.root)
    for each in (folder.secrets, folder.controller, folder.logs):
        make_private_folder(each)
    folder.worker.mkdir(mode=0o700, exist_ok=True)
    if folder.worker.stat().st_mode & 0o066:  # the worker lets backends of another user pass through it, no more
        folder.worker.chmod(0o700)
    if os.geteuid() == 0:  # to the worker's folder; everything else in here is closed by itself
        folder.root.chmod(folder.root.stat().st_mode | 0o011)


def check_room(folder: DataFolder) -> None:
    """One line now, rather than a controller that keeps ending because it cannot write."""
    free = shutil.disk_usage(folder.root).free
    if free < LEAST_ROOM:
        raise Failed(f"{folder.root}: only {size(free)} free on its disk: make room, or choose another with --data")


def make_run_folder(path: Path) -> None:
    """Private and ours, or nothing at all: in /tmp anybody may have been there first."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise Failed(f"{path} is not a folder of this user: remove it, or set XDG_RUNTIME_DIR to a private folder")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)


def make_key(path: Path) -> str:
    """The key in this file, made when there is none. One that others can read is closed to them."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        text = new_secret(API_KEY)
        write_secret(path, text + "\n")
        return text
    except UnicodeDecodeError as error:
        raise Failed(f"{path} does not hold a key: remove it and a new one is made") from error
    if not text.startswith(API_KEY) or len(text) < 32 or len(text.split()) != 1:
        raise Failed(f"{path} does not hold a key: remove it and a new one is made")
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)
    return text


def make_certificates(folder: DataFolder, names: tuple[str, ...], now: datetime) -> Ca:
    """A CA for ever, and a server certificate that is good for every name and address this machine has now."""
    ca = _load_ca(folder) if _has_ca(folder) else _make_ca(folder, now)
    if needs_renewal(
        read_or_empty(folder.server_cert), read_or_empty(folder.server_key), names, ca.certificate_pem, now
    ):
        issued = ca.issue_server(names, now, life=SERVER_LIFE)
        # The key first: a crash in between leaves a pair that does not fit, which the next start sees and replaces.
        write_secret(folder.server_key, issued.key_pem)
        write_atomically(folder.server_cert, issued.certificate_pem.encode(), mode=0o644)
    return ca


def needs_renewal(certificate: str, key: str, names: tuple[str, ...], ca_pem: str, now: datetime) -> bool:
    """Pure. A name more than needed does no harm: a laptop that comes home again needs no new certificate."""
    try:
        return (
            expires_at(certificate) - now < RENEW_BEFORE
            or not frozenset(names) <= names_of(certificate)
            or not _is_pair(certificate, key)
            or not _is_issued_by(certificate, ca_pem)
        )
    except ValueError:  # absent, or not a certificate
        return True


def _is_pair(certificate: str, key: str) -> bool:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificate

    public = load_pem_private_key(key.encode(), password=None).public_key()
    return public == load_pem_x509_certificate(certificate.encode()).public_key()


def _is_issued_by(certificate: str, ca_pem: str) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509 import load_pem_x509_certificate

    try:
        load_pem_x509_certificate(certificate.encode()).verify_directly_issued_by(
            load_pem_x509_certificate(ca_pem.encode())
        )
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _has_ca(folder: DataFolder) -> bool:
    """A key alone that has signed nothing yet is what a crash in `_make_ca` leaves: nobody knows it, so it may go."""
    return folder.ca_cert.exists() or (folder.ca_key.exists() and folder.server_cert.exists())


def _make_ca(folder: DataFolder, now: datetime) -> Ca:
    made = make_ca(f"Corral {now:%Y-%m-%d}", now)
    write_secret(folder.ca_key, made.key_pem)
    write_atomically(folder.ca_cert, made.certificate_pem.encode(), mode=0o644)
    return Ca(made.certificate_pem, made.key_pem)


def _load_ca(folder: DataFolder) -> Ca:
    try:
        return Ca(folder.ca_cert.read_text(), folder.ca_key.read_text())
    except FileNotFoundError as error:
        raise Failed(
            f"{error.filename} is missing while its other half is there: restore it, or remove both "
            "ca.crt and ca.key for a new CA (every machine then joins anew)"
        ) from error
    except ValueError as error:
        raise Failed(
            f"the CA in {folder.secrets} cannot be used ({error}): restore it, or remove both "
            "ca.crt and ca.key for a new one (every machine then joins anew)"
        ) from error


def read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
