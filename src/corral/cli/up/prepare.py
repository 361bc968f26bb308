"""Creates folders, secrets and certificates before the processes start. Safe to repeat at every start."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from corral.cli.common.data_folder import DataFolder, Secrets
from corral.kit.certificates import Ca, expires_at, make_ca, subject_names
from corral.kit.errors import Failed, Invalid
from corral.kit.files import make_folder, make_private_folder, write_atomically, write_secret
from corral.kit.humanize import format_bytes
from corral.kit.secrets import API_KEY, new_secret
from corral.kit.server_certificate import ServerCertificate

SERVER_LIFE = timedelta(days=397)  # the longest that every TLS client accepts
RENEW_BEFORE = timedelta(days=30)
MIN_FREE_BYTES = 4 * 1024 * 1024  # the size that the write-ahead log of the database can reach


@contextlib.contextmanager
def explain_os_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into one line that says what to do."""
    try:
        yield
    except OSError as error:
        path = error.filename or folder
        raise Failed(f"{path}: {error.strerror or error}: {_fix_for(error, folder)}") from error


def _fix_for(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or choose another folder with --data"
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"another user owns it: change that (chown -R {os.getuid()} {folder}), or choose another folder with --data"
        )
    if error.errno == errno.EROFS:
        return "choose a writable folder with --data"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "a file is in the place of a folder: choose another folder with --data"
    return "choose another folder with --data"


def make_folders(folder: DataFolder) -> None:
    make_folder(folder.root)
    for each in (folder.secrets, folder.controller, folder.logs):
        make_private_folder(each)
    folder.worker.mkdir(mode=0o700, exist_ok=True)
    if (
        folder.worker.stat().st_mode & 0o066
    ):  # backends of another user only need to traverse it; the worker sets that bit
        folder.worker.chmod(0o700)
    if os.geteuid() == 0:  # the path to the folder of the worker; the other folders are private themselves
        folder.root.chmod(folder.root.stat().st_mode | 0o011)


def check_free_space(folder: DataFolder) -> None:
    """Refuse to start on a full disk, where the controller could not write its database."""
    free = shutil.disk_usage(folder.root).free
    if free < MIN_FREE_BYTES:
        raise Failed(
            f"{folder.root}: only {format_bytes(free)} free on its disk: "
            "free some space, or choose another folder with --data"
        )


def make_run_folder(path: Path) -> None:
    """Create the private folder of the sockets. In /tmp another user may have created it: then it is refused."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise Failed(f"{path} is not a folder of this user: remove it, or set XDG_RUNTIME_DIR to a private folder")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)


def make_key(path: Path) -> str:
    """The key in this file, which is created if missing. Permissions that let other users read it are removed."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        text = new_secret(API_KEY)
        write_secret(path, text + "\n")
        return text
    except UnicodeDecodeError as error:
        raise Failed(f"{path} does not contain a key: remove the file, and the next start creates a new key") from error
    if not text.startswith(API_KEY) or len(text) < 32 or len(text.split()) != 1:
        raise Failed(f"{path} does not contain a key: remove the file, and the next start creates a new key")
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)
    return text


def make_certificates(folder: Secrets, names: tuple[str, ...], now: datetime) -> Ca:
    """Create the CA once, and a server certificate for every current name and address of this machine."""
    ca = load_ca(folder) if _has_ca(folder) else _make_ca(folder, now)
    if needs_renewal(
        read_or_empty(folder.server_cert), read_or_empty(folder.server_key), names, ca.certificate_pem, now
    ):
        issued = ca.issue_server(names, now, life=SERVER_LIFE)
        # The key first: a crash in between leaves a pair that does not match, which the next start replaces.
        write_secret(folder.server_key, issued.key_pem)
        write_atomically(folder.server_cert, issued.certificate_pem.encode(), mode=0o644)
    return ca


def read_own_certificate(certificate: Path | None, key: Path | None) -> tuple[str, ...]:
    """Check the pair; returns its host names. Raises Invalid with one line that says what is wrong."""
    if certificate is None or key is None:
        return ()
    names = ServerCertificate(certificate, key).host_names
    if not names:
        raise Invalid(
            f"--tls-cert: {certificate} has no host name (subjectAltName DNS): clients of an address get a certificate "
            "of the fleet's CA"
        )
    return names


def renewal_warning(certificate: Path) -> str:
    """What a renewal of this certificate would break; empty if nothing."""
    from corral.kit.certificate_chain import read_chain  # here: most fleets have no certificate of their own

    try:
        chain = read_chain(certificate.read_bytes())
    except (OSError, ValueError):
        return ""  # replaced a moment ago; the gateway says so
    if not chain.is_alone or chain.is_trusted_by_system():
        return ""
    return (
        f"{certificate} has no issuer in it that joining machines could pin: after a renewal they need the new "
        "fingerprint. Put the certificate of its CA at the end of the file"
    )


def needs_renewal(certificate: str, key: str, names: tuple[str, ...], ca_pem: str, now: datetime) -> bool:
    """Pure. Additional names are allowed: a laptop that returns to its home network needs no new certificate."""
    try:
        return (
            expires_at(certificate) - now < RENEW_BEFORE
            or not frozenset(names) <= subject_names(certificate)
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


def _has_ca(folder: Secrets) -> bool:
    """A key without any certificate is left by a crash in `_make_ca`; it was never used, so it is replaced."""
    return folder.ca_cert.exists() or (folder.ca_key.exists() and folder.server_cert.exists())


def _make_ca(folder: Secrets, now: datetime) -> Ca:
    made = make_ca(f"Corral {now:%Y-%m-%d}", now)
    write_secret(folder.ca_key, made.key_pem)
    write_atomically(folder.ca_cert, made.certificate_pem.encode(), mode=0o644)
    return Ca(made.certificate_pem, made.key_pem)


def load_ca(folder: Secrets) -> Ca:
    """The CA that is in the folder."""
    try:
        return Ca(folder.ca_cert.read_text(), folder.ca_key.read_text())
    except FileNotFoundError as error:
        raise Failed(
            f"{error.filename} is missing, but the other file of the CA exists: restore it, or remove both "
            "ca.crt and ca.key to create a new CA (every machine must then join again)"
        ) from error
    except ValueError as error:
        raise Failed(
            f"the CA in {folder.secrets} cannot be used ({error}): restore it, or remove both "
            "ca.crt and ca.key to create a new one (every machine must then join again)"
        ) from error


def read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
