"""What can go wrong with content, named by what the caller does about it."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from corral.kit.errors import CorralError, Failed, Invalid, NoCapacity, NotFound, Unavailable


class WrongDigest(Failed):
    """The bytes are not the ones that were asked for, and asking again brought the same."""

    code = "wrong_digest"


class NoBuild(NotFound):
    """The image exists, but not for this platform; `platforms` are those it is made for."""

    code = "no_build"

    def __init__(self, reference: str, platform: str, platforms: Sequence[str]) -> None:
        offered = f"; it is made for {', '.join(platforms)}" if platforms else ""
        super().__init__(f"no {platform} build of {reference}{offered}")
        self.platform = platform
        self.platforms = tuple(platforms)


class BadArchive(Invalid):
    """The archive or image cannot be read, or uses something we do not take."""

    code = "bad_archive"


class UnsafeArchive(BadArchive):
    """The archive reaches for something outside its own folder, or brings what no backend may bring."""

    code = "unsafe_archive"


class TooLarge(Invalid):
    """More than the bounds allow: a bomb, or a mistake."""

    code = "too_large"


class NoSpace(NoCapacity):
    """The disk has no room for it; nothing was changed."""

    code = "no_space"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=60.0)


def is_final(error: BaseException) -> bool:
    """Whether time cannot cure it: the same order would fail the same way until gallery, node or order change."""
    return isinstance(error, Invalid | NotFound | WrongDigest)


def from_os(error: OSError, doing: str) -> CorralError:
    """A local disk's complaint in our words."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"the disk is full: {doing}")
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return BadArchive(f"{doing}: {reason}")
    return Unavailable(f"{doing}: {reason}")
