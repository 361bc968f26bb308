"""What is not everybody's business."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from corral.kit.errors import Unavailable
from corral.kit.log import get_log

log = get_log(__name__)


@contextlib.contextmanager
def before_we_know_who_asks() -> Iterator[None]:
    """A database's refusal names hosts, users and files. Whoever has shown no key yet only learns that it is away."""
    try:
        yield
    except Unavailable as error:
        log.debug("database away", error=error.message)  # the loops that need it say so louder, once
        raise Unavailable("the database cannot be used right now; try again shortly") from error
