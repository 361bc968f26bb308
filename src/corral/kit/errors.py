"""The errors of the house. Each name tells the caller what to do; `api/errors.py` alone turns them into HTTP."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence


class CorralError(Exception):
    """Base of every error we raise on purpose. `code` is stable: scripts may match it."""

    code = "error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Invalid(CorralError):
    """The request cannot be served as asked; the caller changes it."""

    code = "invalid"


class Unauthenticated(CorralError):
    """Nobody we know is asking."""

    code = "unauthenticated"


class Denied(CorralError):
    """We know who asks, and they may not."""

    code = "denied"


class NotFound(CorralError):
    """There is no such thing."""

    code = "not_found"


class Gone(CorralError):
    """It was here and was removed on purpose; asking again will not bring it back."""

    code = "gone"


class Conflict(CorralError):
    """The world moved since it was read: read and decide again."""

    code = "conflict"


class NoCapacity(CorralError):
    """Nothing fits now; `why` has one line per candidate. Wait `retry_after_s`, then ask again."""

    code = "no_capacity"

    def __init__(self, message: str, *, why: Sequence[str] = (), retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.why = tuple(why)
        self.retry_after_s = retry_after_s


class Failed(CorralError):
    """The other side tried and said no; its reason is inside. Do not repeat blindly."""

    code = "failed"


class Unreachable(CorralError):
    """Nobody listens on the other side, so certainly nothing happened."""

    code = "unreachable"


class OutcomeUnknown(CorralError):
    """No answer: it may or may not have happened. Look, or repeat with the same id."""

    code = "outcome_unknown"


class Unavailable(CorralError):
    """Something of ours (database, bus) cannot be reached right now; nothing was changed."""

    code = "unavailable"


def reason_of(error: OSError) -> str:
    """The system's own few words for it: asyncio puts longer ones of its own in their place."""
    if error.errno in errno.errorcode and not isinstance(error, socket.gaierror):  # that one has numbers of its own
        return os.strerror(error.errno or 0)
    return error.strerror or str(error) or type(error).__name__
