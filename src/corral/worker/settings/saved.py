"""Saves the flags of `corral join` in the worker's data folder for later starts.

`corral join URL --port 50051` is typed once; a later `corral worker` with the same folder is the same node on the same
port. Only flags are saved: people keep an environment and a file themselves. Secrets are not saved, nor what
`identity.json` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.contract.codec import Undecodable, decode, encode
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.settings import describe, value_of
from corral.worker.settings import WorkerSettings

log = get_log(__name__)

FILE = "settings.json"
# Settings of one start, not of the node; or stored in `identity.json`.
_NOT_SAVED = frozenset({"token", "token_file", "data", "controller", "ca", "name", "log_level", "log_json"})


def saved_names() -> frozenset[str]:
    return frozenset(doc.name for doc in describe(WorkerSettings) if not doc.secret) - _NOT_SAVED


def choose(settings: WorkerSettings, flags: Mapping[str, Any]) -> dict[str, str | bool]:
    """The given flags that are saved. Paths become absolute: the next start may run in another folder. Pure."""
    chosen: dict[str, str | bool] = {}
    for name in sorted(saved_names() & flags.keys()):
        if flags[name] is None:
            continue
        value = value_of(settings, name)
        chosen[name] = str(value.absolute()) if isinstance(value, Path) else flags[name]
    return chosen


def read(folder: Path) -> dict[str, str | bool]:
    """The saved flags of earlier starts. A worker starts without them if the file cannot be read."""
    path = folder / FILE
    try:
        found = decode(dict[str, str | bool], path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, Undecodable) as error:
        log.warning("saved settings cannot be read", file=str(path), reason=str(error))
        return {}
    known = saved_names()
    return {name: value for name, value in found.items() if name in known}


def save(folder: Path, given: Mapping[str, str | bool]) -> None:
    """Add these flags to the saved ones; the last value of a flag counts. Only the worker that holds the folder's lock
    calls this."""
    before = read(folder)
    after = {**before, **given}
    if after == before:
        return
    try:
        write_atomically(folder / FILE, encode(after), mode=0o600)
    except OSError as error:
        log.warning("settings cannot be saved", file=str(folder / FILE), reason=error.strerror)
        return
    log.info("settings saved for later starts", file=str(folder / FILE), names=", ".join(sorted(given)))
