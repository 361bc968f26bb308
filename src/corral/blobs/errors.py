"""Errors about content, named by what the caller does about them."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from corral.kit.errors import CorralError, Failed, Invalid, NoCapacity, NotFound, Unavailable


class WrongDigest(Failed):
    """The bytes do not have the expected digest, and a second download brought the same bytes."""

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
    """The archive or image cannot be read, or uses a feature that is not supported."""

    code = "bad_archive"


class UnsafeArchive(BadArchive):
    """The archive would write outside its own folder, or contains a kind of file that no backend may contain."""

    code = "unsafe_archive"


class TooLarge(Invalid):
    """The content exceeds the limits: a decompression bomb, or a mistake."""

    code = "too_large"


class NoSpace(NoCapacity):
    """The disk has too little free space; nothing was changed."""

    code = "no_space"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=60.0)


def is_final(error: BaseException) -> bool:
    """Whether a retry is useless: the same order fails the same way until the gallery, the node or the order
    changes."""
    return isinstance(error, Invalid | NotFound | WrongDigest)


def from_os(error: OSError, doing: str) -> CorralError:
    """Translate an error of the local disk."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"the disk is full: {doing}")
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return BadArchive(f"{doing}: {reason}")
    return Unavailable(f"{doing}: {reason}")
