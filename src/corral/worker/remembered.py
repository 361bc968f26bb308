"""Settings that a person gave once on the command line, kept in the worker's data folder for the next starts.

`corral join URL --port 50051` is typed once; a plain `corral worker` on the same folder later shall be the same node on
the same port. Only flags are kept: the environment and a file are somebody's own way of keeping settings. Secrets are
not kept, nor what `identity.json` holds anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.contract.codec import Undecodable, decode, encode
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.settings import describe
from corral.worker.settings import WorkerSettings

log = get_log(__name__)

FILE = "settings.json"
# Of this start, not of the node; or kept in `identity.json`.
_NOT_KEPT = frozenset({"token", "token_file", "data", "controller", "ca", "name", "log_level", "log_json"})


def kept_names() -> frozenset[str]:
    return frozenset(doc.name for doc in describe(WorkerSettings) if not doc.secret) - _NOT_KEPT


def choose(settings: WorkerSettings, flags: Mapping[str, Any]) -> dict[str, str | bool]:
    """Of the flags given, those to keep. Paths become absolute: the next start may be in another folder. Pure."""
    kept: dict[str, str | bool] = {}
    for name in sorted(kept_names() & flags.keys()):
        if flags[name] is None:
            continue
        value = getattr(settings, name)
        kept[name] = str(value.absolute()) if isinstance(value, Path) else flags[name]
    return kept


def read(folder: Path) -> dict[str, str | bool]:
    """What earlier starts were given. A file that cannot be read costs the settings, not the start."""
    path = folder / FILE
    try:
        found = decode(dict[str, str | bool], path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, Undecodable) as error:
        log.warning("the settings of earlier starts cannot be read", file=str(path), reason=str(error))
        return {}
    known = kept_names()
    return {name: value for name, value in found.items() if name in known}


def remember(folder: Path, given: Mapping[str, str | bool]) -> None:
    """Beside what is kept already; a flag given again counts from now on. Only by the worker that holds the folder."""
    before = read(folder)
    after = {**before, **given}
    if after == before:
        return
    try:
        write_atomically(folder / FILE, encode(after), mode=0o600)
    except OSError as error:
        log.warning("the settings cannot be kept for the next start", file=str(folder / FILE), reason=error.strerror)
        return
    log.info("settings kept for later starts", file=str(folder / FILE), names=", ".join(sorted(given)))
