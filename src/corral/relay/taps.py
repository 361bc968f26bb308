"""Shows a response to the tap of its handler. A tap that raises is dropped; the response goes on without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from corral.contract.http import Tap
from corral.kit.log import get_log

if TYPE_CHECKING:
    from corral.relay.http1.head import ResponseHead

log = get_log(__name__)


class Tapped(Protocol):
    """A response with a tap: an exchange, or a stream on the fast path."""

    tap: Tap | None


def show_head(response: Tapped, head: ResponseHead) -> None:
    try:
        if response.tap is not None:
            response.tap.head(head.status, head.fields.headers)
    except Exception:
        drop_tap(response)


def show(response: Tapped, piece: bytes) -> None:
    try:
        if response.tap is not None:
            response.tap.data(piece)
    except Exception:
        drop_tap(response)


def drop_tap(response: Tapped) -> None:
    """Call this in the handler of the tap's exception."""
    log.exception("a tap failed; the response goes on without it")
    response.tap = None
