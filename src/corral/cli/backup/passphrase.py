"""Where the passphrase of a backup comes from: a file, the environment, or a prompt. Never an argument, which other
users of the machine can read."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from corral.cli.common import declare
from corral.cli.common.output import is_interactive
from corral.kit.errors import Invalid

VARIABLE = "CORRAL_BACKUP_PASSPHRASE"
_MIN_LETTERS = 8
_MAX_BYTES = 4096
_SOURCES = f"--passphrase-file FILE or {VARIABLE}"


def given_passphrase(file: str | None) -> str | None:
    """The one of the file, else of the environment; None if neither is given."""
    if file is not None:
        return _read(Path(file).expanduser())
    return os.environ.get(VARIABLE) or None


def choose_passphrase() -> str:
    """Ask for a new passphrase, twice."""
    if not is_interactive():
        raise declare.BadParameter(f"--with-secrets needs a passphrase, and there is no terminal: give {_SOURCES}")
    chosen = getpass.getpass("Passphrase of the backup: ")
    check_strength(chosen)
    if getpass.getpass("The same again: ") != chosen:
        raise Invalid("the two passphrases differ: nothing was written")
    return chosen


def ask_passphrase() -> str:
    """Ask for the passphrase of a sealed backup."""
    if not is_interactive():
        raise Invalid(f"the backup is sealed with a passphrase: give it with {_SOURCES}")
    return getpass.getpass("Passphrase of the backup: ")


def check_strength(passphrase: str) -> None:
    if len(passphrase) < _MIN_LETTERS:
        raise Invalid(f"the passphrase is too short: use at least {_MIN_LETTERS} letters, better four words or more")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1).decode()
    except OSError as error:
        raise Invalid(f"--passphrase-file: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Invalid(f"--passphrase-file: {path} is not text") from error
    lines = text.splitlines()
    if len(text) > _MAX_BYTES or len(lines) != 1 or not lines[0]:
        raise Invalid(f"--passphrase-file: {path} must contain the passphrase, in one line")
    return lines[0]
