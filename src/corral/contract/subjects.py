"""Subjects on the bus, each tied to the types that travel on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Generic, TypeVar

from corral.contract.codec import Message

Asked = TypeVar("Asked", bound=Message)
Answered = TypeVar("Answered", bound=Message)
Told = TypeVar("Told", bound=Message)

_UNSAFE = str.maketrans(dict.fromkeys(".*> \t\n", "-"))
_TOKEN = re.compile(r"\{(\w+)\}")


def sanitise(token: str) -> str:
    """What the contract allows in one place of a subject: `.`, `*`, `>`, space, tab and newline become `-`."""
    return token.translate(_UNSAFE)


@dataclass(frozen=True)
class Subject:
    """A template such as `nodes.{node}.backend.install`."""

    template: str

    def fill(self, **tokens: str) -> str:
        """The subject to publish on. An empty token would make a subject the server refuses, so it is refused here."""
        if empty := [name for name, value in tokens.items() if not value]:
            raise ValueError(f"empty token {empty[0]!r} in subject {self.template}")
        return self.template.format(**{name: sanitise(value) for name, value in tokens.items()})

    def match_all(self, **tokens: str) -> str:
        """The subject to subscribe to: tokens not given become `*`."""
        known = {name: sanitise(value) for name, value in tokens.items()}
        return _TOKEN.sub(lambda found: known.get(found.group(1), "*"), self.template)

    def read(self, subject: str) -> dict[str, str]:
        """The tokens of a concrete subject, by name. Values are sanitised: ids survive that, names may not."""
        pairs = zip(self.template.split("."), subject.split("."), strict=False)
        return {part[1:-1]: value for part, value in pairs if part.startswith("{")}


@dataclass(frozen=True)
class Call(Generic[Asked, Answered]):
    """Request and reply."""

    subject: Subject
    asked: type[Asked]
    answered: type[Answered]


@dataclass(frozen=True)
class Event(Generic[Told]):
    """Publish and forget: losing one costs latency, never state."""

    subject: Subject
    told: type[Told]


def call(template: str, asked: type[Asked], answered: type[Answered]) -> Call[Asked, Answered]:
    return Call(Subject(template), asked, answered)


def event(template: str, told: type[Told]) -> Event[Told]:
    return Event(Subject(template), told)
