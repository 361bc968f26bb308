"""The errors of Corral. The type tells the caller what to do; only `api/errors.py` turns them into HTTP."""

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
    """The caller's credentials are missing or unknown."""

    code = "unauthenticated"


class Denied(CorralError):
    """The caller is known and has no permission."""

    code = "denied"


class NotFound(CorralError):
    """The named thing does not exist."""

    code = "not_found"


class Gone(CorralError):
    """The thing existed and was removed on purpose; a retry does not help."""

    code = "gone"


class Conflict(CorralError):
    """The state changed since it was read: read and decide again."""

    code = "conflict"


class NoCapacity(CorralError):
    """Nothing fits now; `why` has one line per candidate. Wait `retry_after_s`, then retry."""

    code = "no_capacity"

    def __init__(self, message: str, *, why: Sequence[str] = (), retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.why = tuple(why)
        self.retry_after_s = retry_after_s


class Failed(CorralError):
    """The other side tried and refused or failed; the message has its reason. Do not retry blindly."""

    code = "failed"


class Unreachable(CorralError):
    """No process listens on the other side, so nothing happened."""

    code = "unreachable"


class OutcomeUnknown(CorralError):
    """No answer: the request may or may not have taken effect. Check, or repeat it with the same id."""

    code = "outcome_unknown"


class Unavailable(CorralError):
    """The database or the bus cannot be reached now; nothing was changed."""

    code = "unavailable"


def reason_of(error: OSError) -> str:
    """The system's short text for the error: asyncio replaces it by a longer one."""
    if error.errno in errno.errorcode and not isinstance(error, socket.gaierror):  # that one has numbers of its own
        return os.strerror(error.errno or 0)
    return error.strerror or str(error) or type(error).__name__
