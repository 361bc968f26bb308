"""Settings of a process: one frozen dataclass, read from flags, environment and a file. All faults are reported.

A field is declared with `setting(...)`. Its name gives the flag (`--heartbeat-interval`), the variable
(`CORRAL_HEARTBEAT_INTERVAL`) and the key in the file; other variables may be aliases. Flags win over the environment,
the environment over the file, the file over the default. Every setting of a process is declared in its `settings.py`.

A field declared with `group(...)` holds a dataclass of settings that one part of the process receives whole. Groups
have no name outside the code: flags, variables and keys are those of the settings inside.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, Union
from urllib.parse import urlsplit

from corral.kit.durations import format_duration, parse_duration_s
from corral.kit.errors import CorralError

T = TypeVar("T")
_DECLARED = "corral.setting"
_ORIGINS = "_origins"
_DeclaredFields: TypeAlias = tuple[tuple[dataclasses.Field[Any], Any], ...]
_LOG_LEVELS = ("debug", "info", "warning", "error")


class Seconds(float):
    """A span of time, so that the reader knows `15m` when it meets one."""


class BadSettings(CorralError):
    """Some settings cannot be used; `faults` has one line each."""

    code = "bad_settings"

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True)
class Declared:
    help: str
    aliases: tuple[str, ...]
    secret: bool
    advanced: bool
    parse: Callable[[str], Any] | None
    check: Callable[[Any], str | None] | None


@dataclass(frozen=True)
class SettingDoc:
    """One row of the reference page and one option of the command."""

    name: str
    flag: str
    env: str
    aliases: tuple[str, ...]
    kind: str
    default: str
    help: str
    secret: bool
    advanced: bool


def setting(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    aliases: Sequence[str] = (),
    secret: bool = False,
    advanced: bool = False,
    parse: Callable[[str], Any] | None = None,
    check: Callable[[Any], str | None] | None = None,
) -> Any:
    """Declare a field. `parse` reads text where the field's type does not say how; it raises ValueError with a
    sentence. `check` returns what is wrong with a value, or None. Without a default the setting is required."""
    declared = Declared(help, tuple(aliases), secret, advanced, parse, check)
    return dataclasses.field(default=default, metadata={_DECLARED: declared})


def group(kind: type[Any]) -> Any:
    """Declare a field that holds a group of settings: a frozen dataclass whose settings all have defaults."""
    return dataclasses.field(default_factory=kind)


def read_settings(
    kind: type[T],
    *,
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    file: Path | None = None,
    remembered: Mapping[str, Any] | None = None,
    remembered_in: Path | None = None,
) -> T:
    """Build the settings or raise `BadSettings` naming every fault by the words the person used. `remembered` are
    settings of earlier starts: anything given now wins over them."""
    faults: list[str] = []
    from_file = _read_file(file, faults)
    names = {spelling for field, _ in _declared_fields(kind) for spelling in _spellings(field.name)}
    faults.extend(f"{file}: unknown setting {key!r}" for key in from_file if key not in names)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for field, type_ in _declared_fields(kind):
        declared: Declared = field.metadata[_DECLARED]
        found = _find(field.name, declared, flags, env, from_file, file)
        if found is None and remembered is not None and field.name in remembered:
            found = f"{remembered_in}: {field.name}", remembered[field.name]
        if found is None:
            if field.default is dataclasses.MISSING:
                faults.append(f"{flag_of(field.name)} (or {env_of(field.name)}) is required: {declared.help}")
            continue
        source, raw = found
        try:
            value = _convert(raw, type_, declared)
        except ValueError as error:
            faults.append(f"{source}: {'cannot be used' if declared.secret else error}")
            continue
        wrong = declared.check(value) if declared.check else None
        if wrong:
            faults.append(f"{source}: {wrong}")
            continue
        values[field.name], origins[field.name] = value, source
    if faults:
        raise BadSettings(faults)
    settings = build_settings(kind, values)
    object.__setattr__(settings, _ORIGINS, origins)  # no setting itself, and no part of equality
    return settings


def origins_of(settings: Any) -> Mapping[str, str]:
    """Where each value that was given came from: a flag, a variable, a place in a file. Others are defaults."""
    return getattr(settings, _ORIGINS, {})


def build_settings(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build settings from values by name, each put into its group. Raises `BadSettings`: the faults of all groups."""
    faults: list[str] = []
    given: dict[str, Any] = {}
    for field in dataclasses.fields(_as_dataclass(kind)):
        if _DECLARED in field.metadata:
            if field.name in values:
                given[field.name] = values[field.name]
            continue
        try:
            given[field.name] = build_settings(_group_kind(field), values)
        except BadSettings as error:
            faults.extend(error.faults)
    if faults:
        raise BadSettings(faults)
    return kind(**given)


def value_of(settings: Any, name: str) -> Any:
    """The value of the setting with this name, in whichever group it is."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if _DECLARED in field.metadata:
            if field.name == name:
                return value
        elif any(inner.name == name for inner, _ in _declared_fields(type(value))):
            return value_of(value, name)
    raise KeyError(name)


def describe(kind: type[Any]) -> list[SettingDoc]:
    """Every setting, in the order of declaration: for `--help`, the reference page and the test that compares them."""
    docs = []
    for field, type_ in _declared_fields(kind):
        declared: Declared = field.metadata[_DECLARED]
        docs.append(
            SettingDoc(
                name=field.name,
                flag=flag_of(field.name),
                env=env_of(field.name),
                aliases=declared.aliases,
                kind=_kind_name(type_),
                default="required" if field.default is dataclasses.MISSING else _show(field.default),
                help=declared.help,
                secret=declared.secret,
                advanced=declared.advanced,
            )
        )
    return docs


def shown_changes(settings: Any) -> dict[str, str]:
    """The settings that differ from their defaults: one line of the log at start, which people read."""
    fields = _declared_fields(type(settings))
    changed = {field.name for field, _ in fields if value_of(settings, field.name) != field.default}
    return {name: text for name, text in shown(settings).items() if name in changed}


def shown(settings: Any) -> dict[str, str]:
    """All settings: secrets are only said to be set or not."""
    result = {}
    for field, _ in _declared_fields(type(settings)):
        declared: Declared = field.metadata[_DECLARED]
        value = value_of(settings, field.name)
        result[field.name] = ("set" if value else "not set") if declared.secret else _show(value)
    return result


def flag_of(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def env_of(name: str) -> str:
    return "CORRAL_" + name.removesuffix("_s").upper()


def _spellings(name: str) -> tuple[str, str]:
    """In a file a span may be called `interval` or `interval_s`."""
    return name.removesuffix("_s"), name


def _declared_fields(kind: Any) -> _DeclaredFields:
    """Every setting with its type, in the order of declaration; those of a group where the group stands."""
    return _resolve_fields(kind)


@functools.cache  # resolving annotations takes milliseconds, and each process asks several times as it starts
def _resolve_fields(kind: Any) -> _DeclaredFields:
    hints = typing.get_type_hints(kind)
    found: list[tuple[dataclasses.Field[Any], Any]] = []
    for field in dataclasses.fields(_as_dataclass(kind)):
        if _DECLARED in field.metadata:
            found.append((field, hints[field.name]))
        else:
            found.extend(_declared_fields(_group_kind(field)))
    return tuple(found)


def _group_kind(field: dataclasses.Field[Any]) -> type[Any]:
    kind: Any = field.default_factory
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{field.name} is declared neither with setting() nor with group()")
    return kind  # type: ignore[return-value]


def _as_dataclass(kind: type[Any]) -> Any:
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a dataclass")
    return kind


def _read_file(file: Path | None, faults: list[str]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        with file.open("rb") as stream:
            return {key.replace("-", "_"): value for key, value in tomllib.load(stream).items()}
    except OSError as error:
        faults.append(f"{file}: cannot be read: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        faults.append(f"{file}: not TOML: {error}")
    return {}


def _find(
    name: str,
    declared: Declared,
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    from_file: Mapping[str, Any],
    file: Path | None,
) -> tuple[str, Any] | None:
    if flags.get(name) is not None:
        return flag_of(name), flags[name]
    for variable in (env_of(name), *declared.aliases):
        if env.get(variable):  # an empty variable counts as not set: that is how compose files unset one
            return variable, env[variable]
    for key in _spellings(name):
        if key in from_file:
            return f"{file}: {key}", from_file[key]
    return None


def _convert(raw: Any, kind: Any, declared: Declared) -> Any:
    if declared.parse is not None and isinstance(raw, str):
        return declared.parse(raw)
    kind = _without_none(kind)
    if kind is Seconds:
        if isinstance(raw, bool):
            raise ValueError("a span of time is expected, such as 10s")
        return Seconds(parse_duration_s(str(raw)))
    if kind is bool:
        return raw if isinstance(raw, bool) else _read_bool(str(raw))
    if kind is int:
        return _read_int(raw)
    if kind is Path:
        return Path(str(raw)).expanduser()
    if kind is str:
        return str(raw)
    if typing.get_origin(kind) is tuple:
        parts = raw if isinstance(raw, list | tuple) else str(raw).split(",")
        return tuple(str(part).strip() for part in parts if str(part).strip())
    return raw


def _read_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _read_int(raw: Any) -> int:
    try:
        if isinstance(raw, bool):
            raise ValueError
        return int(raw)
    except (TypeError, ValueError):
        raise ValueError(f"{raw!r} is not a whole number") from None


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (Union, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def _kind_name(kind: Any) -> str:
    kind = _without_none(kind)
    names = {Seconds: "duration", bool: "true/false", int: "number", Path: "path", str: "text"}
    return names.get(kind, "list" if typing.get_origin(kind) is tuple else "text")


def _show(value: Any) -> str:
    if value is None or value == "" or value == ():
        return ""
    if isinstance(value, Seconds):
        return format_duration(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value)
    return str(value)


# Checks that several processes use: each returns what is wrong with a value, or None.


def positive(value: float) -> str | None:
    return None if value > 0 else "must be more than zero"


def not_negative(value: float) -> str | None:
    return None if value >= 0 else "must not be less than zero"


def at_least_one(value: int) -> str | None:
    return None if value >= 1 else f"{value} is less than 1"


def valid_port(value: int) -> str | None:
    return None if 0 <= value <= 65535 else f"{value} is not a port; give 0 (any free one) to 65535"


def plain_http_url(value: str, *, example: str, secret_flags: str) -> str | None:
    """A URL of scheme, host and port. `secret_flags`: where its secret goes, in words."""
    try:
        parts = urlsplit(value)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        is_usable = False
    if not is_usable:
        shown = "this" if "@" in value else repr(value)  # it may carry a password
        return f"{shown} is not a URL; give one such as {example}"
    if parts.username or parts.password:
        return f"the URL carries a password; give {secret_flags} instead"
    if parts.query or parts.fragment:
        return f"{value!r} has a query; give only scheme, host and port"
    return None


def valid_log_level(value: str) -> str | None:
    return None if value.lower() in _LOG_LEVELS else f"{value!r} is none of {', '.join(_LOG_LEVELS)}"
