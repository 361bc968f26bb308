"""Subjects of the bus, each with the types of its messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Generic, TypeVar

from corral.contract.codec import Message

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)
EventT = TypeVar("EventT", bound=Message)

_UNSAFE = str.maketrans(dict.fromkeys(".*> \t\n", "-"))
_TOKEN = re.compile(r"\{(\w+)\}")


def sanitise(token: str) -> str:
    """A name as one token of a subject: `.`, `*`, `>`, space, tab and newline become `-`."""
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
class Call(Generic[RequestT, ReplyT]):
    """A request with a reply."""

    subject: Subject
    request_type: type[RequestT]
    reply_type: type[ReplyT]


@dataclass(frozen=True)
class Event(Generic[EventT]):
    """A message without a reply: a lost event costs latency, never state."""

    subject: Subject
    message_type: type[EventT]


def call(template: str, request_type: type[RequestT], reply_type: type[ReplyT]) -> Call[RequestT, ReplyT]:
    return Call(Subject(template), request_type, reply_type)


def event(template: str, message_type: type[EventT]) -> Event[EventT]:
    return Event(Subject(template), message_type)
