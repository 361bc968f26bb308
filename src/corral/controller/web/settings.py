"""The settings with which this controller runs, and where each value came from. Secrets are only said to be set or not.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corral.kit.settings import SettingDoc


@dataclass(frozen=True)
class SettingLine:
    name: str
    value: str
    default: str
    origin: str
    is_default: bool
    help: str
    env: str


@dataclass(frozen=True)
class SettingGroup:
    title: str
    lines: tuple[SettingLine, ...]


class EffectiveSettings:
    def __init__(self, docs: Sequence[SettingDoc], values: Mapping[str, str], origins: Mapping[str, str]) -> None:
        """`values` as `kit.settings.shown` has them; `origins` by name, of those that were given."""
        self._lines = [_line(doc, values[doc.name], origins.get(doc.name, "")) for doc in docs]

    def groups(self, find: str = "") -> tuple[SettingGroup, ...]:
        words = find.lower().split()
        lines = [line for line in self._lines if all(word in _searched(line) for word in words)]
        given = tuple(line for line in lines if not line.is_default)
        rest = tuple(line for line in lines if line.is_default)
        groups = (SettingGroup("Given at this start", given), SettingGroup("Defaults", rest))
        return tuple(group for group in groups if group.lines)


def _line(doc: SettingDoc, value: str, origin: str) -> SettingLine:
    return SettingLine(
        name=doc.flag,
        value=value,
        default="" if doc.secret else doc.default,
        origin=origin or "default",
        is_default=not origin,
        help=doc.help,
        env=doc.env,
    )


def _searched(line: SettingLine) -> str:
    return f"{line.name} {line.env} {line.help} {line.origin}".lower()
