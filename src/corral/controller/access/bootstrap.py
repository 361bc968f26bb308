"""Secrets that live in files: made on the first start, read on every other."""

from __future__ import annotations

from pathlib import Path

from corral.kit.certificates import Ca
from corral.kit.files import read_text, write_secret
from corral.kit.secrets import API_KEY, new_secret
from corral.kit.settings import BadSettings


def ensure_key_file(path: Path) -> str:
    """The key in the file; a new one where there is no file."""
    path = path.expanduser()
    try:
        found = read_text(path)
        if found is None:
            found = new_secret(API_KEY)
            write_secret(path, found + "\n")
    except OSError as error:
        raise BadSettings([f"{path}: {error.strerror}"]) from error
    if not found.startswith(API_KEY) or len(found) < 30:
        raise BadSettings([f"{path} does not hold an API key (they start with {API_KEY})"])
    return found


def load_ca(certificate: Path | None, key: Path | None) -> Ca | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadSettings(["--ca-cert and --ca-key come together"])
    try:
        return Ca(certificate.read_text(), key.read_text())
    except OSError as error:
        raise BadSettings([f"{error.filename}: {error.strerror}"]) from error
    except ValueError as error:
        raise BadSettings([f"{certificate}, {key}: {error}"]) from error
