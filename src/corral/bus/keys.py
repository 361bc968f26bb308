"""The bus's keys on disk: made once, mode 0600, in a folder of their own. `auth.py` defines and uses them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from pathlib import Path

from corral.bus.auth import BusKeys
from corral.bus.jwt import BadKey, KeyKind, check_seed
from corral.kit.errors import Invalid
from corral.kit.files import make_folder, read_text, sync_folder, write_secret

_KINDS = {
    "operator_seed": KeyKind.OPERATOR,
    "account_seed": KeyKind.ACCOUNT,
    "system_account_seed": KeyKind.ACCOUNT,
    "system_user_seed": KeyKind.USER,
    "service_user_seed": KeyKind.USER,
}


def load_or_create_keys(folder: Path, now: datetime, *, random_bytes: Callable[[int], bytes] = os.urandom) -> BusKeys:
    """The keys in `folder`, or new ones where there are none at all.

    A folder with only some of them is refused: a new key in place of a missing one would lock every node out.
    """
    found = {name: read_text(folder / file) for name, file in file_names().items()}
    if not any(found.values()):
        return _create(folder, BusKeys.generate(random_bytes, now))
    missing = [file for name, file in file_names().items() if not found[name]]
    if missing:
        raise Invalid(f"{folder} lacks {', '.join(missing)}: restore it, or remove the folder to start with new keys")
    keys = BusKeys(**{name: text or "" for name, text in found.items()})
    for name, kind in _KINDS.items():
        try:
            check_seed(getattr(keys, name), kind)
        except BadKey as error:
            raise Invalid(f"{folder / file_names()[name]}: {error}") from error
    return keys


def file_names() -> dict[str, str]:
    """Field → file: `operator_seed` lives in `operator.seed`."""
    return {field.name: ".".join(field.name.rsplit("_", 1)) for field in fields(BusKeys)}


def _create(folder: Path, keys: BusKeys) -> BusKeys:
    """All of them appear at once, by a rename: a crash half-way must not leave a folder that is then refused."""
    make_folder(folder.parent)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        for name, file in file_names().items():
            write_secret(aside / file, getattr(keys, name))
        try:
            aside.rename(folder)
        except OSError as error:
            raise Invalid(f"{folder} holds other files: move them away so that bus keys can live there") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    return keys
