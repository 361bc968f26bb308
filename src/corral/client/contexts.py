"""Contexts: the fleets of one person on this machine, by name, and which of them commands go to.

A running `corral up` keeps one file per fleet, `<config folder>/contexts/NAME.json`, and removes it when it stops. The
entry of a running fleet is never replaced by another fleet. Earlier versions kept a single `local.json`; a fleet that
is found only there is a context named `local`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from corral.kit.errors import Conflict, Invalid, NotFound
from corral.kit.files import make_private_folder, read_text, write_atomically
from corral.kit.process import lock_holder


class LocalFleet(NamedTuple):
    """Neither a message nor a dataclass: what these import takes longer than a whole list command may."""

    url: str = ""  # as this machine reaches it
    public_url: str = ""  # as others do
    data: str = ""
    admin_key_file: str = ""
    ca_file: str = ""  # PEM; empty = no TLS
    bus_url: str = ""
    pid: int = 0  # of `corral up`
    started_at: float = 0.0  # start of `corral up`, seconds since 1970


def config_folder(env: Mapping[str, str]) -> Path:
    if chosen := env.get("CORRAL_CONFIG_DIR"):
        return Path(chosen).expanduser()
    base = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".config")
    return Path(base) / "corral"


def local_file(env: Mapping[str, str]) -> Path:
    return config_folder(env) / "local.json"


def read_local(path: Path) -> LocalFleet | None:
    """None where there is no such file, or where it cannot be used: then it is as if there were none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    given = {name: found[name] for name in LocalFleet._fields if found.get(name) is not None}
    fleet = LocalFleet(**given)
    if not fleet.url or any(_is_other_type(value, LocalFleet._field_defaults[name]) for name, value in given.items()):
        return None
    return fleet


def _is_other_type(value: object, default: object) -> bool:
    if isinstance(default, float):
        return not isinstance(value, int | float) or isinstance(value, bool)
    return type(value) is not type(default)


def write_local(path: Path, fleet: LocalFleet) -> None:
    make_private_folder(path.parent)
    write_atomically(path, json.dumps(fleet._asdict()).encode() + b"\n", mode=0o600)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LEGACY_NAME = "local"


class Context(NamedTuple):
    name: str
    fleet: LocalFleet
    path: Path
    is_live: bool  # its `corral up` runs

    def __str__(self) -> str:
        return f"{self.name!r} ({self.fleet.url}, {self.fleet.data})"


class Choice(NamedTuple):
    """The context a command goes to. `others` are the running fleets it may have been meant for instead: empty where
    the person named the context or where only one fleet can be meant."""

    context: Context
    others: tuple[Context, ...] = ()


def check_context_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Invalid(
            f"{name!r} cannot name a context: letters, digits, '.', '_' and '-', at most 63, "
            "beginning with a letter or a digit"
        )
    return name


def list_contexts(env: Mapping[str, str]) -> list[Context]:
    """Every fleet that has an entry, sorted by name. Files that cannot be read are left out."""
    found = [
        Context(path.stem, fleet, path, _is_live(fleet))
        for path in sorted(_folder(env).glob("*.json"))
        if _NAME.fullmatch(path.stem) and (fleet := read_local(path)) is not None
    ]
    legacy = read_local(local_file(env))
    known = {each.fleet.data for each in found}
    if legacy is not None and legacy.data not in known and _LEGACY_NAME not in {each.name for each in found}:
        found.append(Context(_LEGACY_NAME, legacy, local_file(env), _is_live(legacy)))
    return sorted(found, key=lambda each: each.name)


def get_context(env: Mapping[str, str], name: str) -> Context:
    contexts = list_contexts(env)
    for each in contexts:
        if each.name == name:
            return each
    known = ", ".join(each.name for each in contexts)
    there = f"the contexts are {known}" if known else "no fleet runs here"
    raise NotFound(f"no context {name!r}: {there} (`corral contexts list`)")


def choose_context(env: Mapping[str, str], name: str | None = None) -> Choice | None:
    """The named one; else the one set with `corral contexts use`; else the running fleet that started first.

    None where there is no fleet at all. A fleet whose `corral up` was killed is chosen only where no other runs."""
    if name := name or env.get("CORRAL_CONTEXT"):
        return Choice(get_context(env, name))
    contexts = list_contexts(env)
    if not contexts:
        return None
    current = read_current(env)
    chosen = min(contexts, key=lambda each: (not each.is_live, each.name != current, each.fleet.started_at, each.name))
    others = tuple(each for each in contexts if each.is_live and each != chosen)
    if not others and current and current != chosen.name and any(each.name == current for each in contexts):
        others = tuple(each for each in contexts if each.name == current)  # the person meant that one; it has ended
    return Choice(chosen, others)


def claim_context(env: Mapping[str, str], fleet: LocalFleet, name: str = "") -> Context:
    """Write the entry of a fleet that runs now, under `name` or, where that is empty or was taken meanwhile, under the
    name of its data folder with a number behind it if need be."""
    with _locked(env):
        contexts = list_contexts(env)
        for each in contexts:
            if each.fleet.data == fleet.data:  # an earlier run on the same folder, perhaps under another name
                each.path.unlink(missing_ok=True)
        taken = {each.name for each in contexts if each.is_live and each.fleet.data != fleet.data}
        chosen = name if name and name not in taken else _free_name(fleet.data, taken)
        for each in contexts:
            if each.name == chosen and each.fleet.data != fleet.data:  # it ended; `contexts use` did not mean this one
                _remove(env, each)
        path = _folder(env) / f"{chosen}.json"
        write_local(path, fleet)
    return Context(chosen, fleet, path, is_live=True)


def refuse_taken(env: Mapping[str, str], name: str, data: str) -> None:
    """Raises `Conflict` where the name belongs to a running fleet of another folder."""
    for each in list_contexts(env):
        if each.name == check_context_name(name) and each.is_live and each.fleet.data != data:
            raise Conflict(
                f"context {each} runs already, pid {each.fleet.pid}: give this fleet another name with --context"
            )


def forget_context(env: Mapping[str, str], *, data: str) -> None:
    """Remove the entry of the fleet in this data folder; a choice made with `contexts use` ends with it."""
    if not _folder(env).is_dir() and not local_file(env).exists():
        return
    with _locked(env):
        for each in list_contexts(env):
            if each.fleet.data == data:
                _remove(env, each)


def delete_context(env: Mapping[str, str], name: str) -> Context:
    """Remove the entry of a fleet that does not run any more."""
    with _locked(env):
        context = get_context(env, name)
        if context.is_live:
            raise Conflict(f"the fleet of context {context} runs, pid {context.fleet.pid}: stop it first")
        _remove(env, context)
    return context


def use_context(env: Mapping[str, str], name: str) -> Context:
    context = get_context(env, name)
    make_private_folder(config_folder(env))
    write_atomically(_current_file(env), f"{context.name}\n".encode(), mode=0o600)
    return context


def read_current(env: Mapping[str, str]) -> str:
    """The name set with `corral contexts use`, or empty."""
    try:
        return read_text(_current_file(env)) or ""
    except (OSError, UnicodeDecodeError):
        return ""


def _remove(env: Mapping[str, str], context: Context) -> None:
    context.path.unlink(missing_ok=True)
    if read_current(env) == context.name:
        _current_file(env).unlink(missing_ok=True)


def _current_file(env: Mapping[str, str]) -> Path:
    return config_folder(env) / "current-context"


def _folder(env: Mapping[str, str]) -> Path:
    return config_folder(env) / "contexts"


def _free_name(data: str, taken: set[str]) -> str:
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data).name).strip("-._")[:50] or "corral"
    number = 1
    name = base
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    return name


def _is_live(fleet: LocalFleet) -> bool:
    try:
        return bool(fleet.data) and lock_holder(Path(fleet.data) / "lock") is not None
    except OSError:  # a folder of another user: nobody can tell, and the address may well answer
        return False


@contextlib.contextmanager
def _locked(env: Mapping[str, str]) -> Iterator[None]:
    """Two fleets that start at once take their names one after the other. Held for a few writes only."""
    folder = _folder(env)
    make_private_folder(folder)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
