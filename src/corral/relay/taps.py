"""What a handler's tap is shown of an answer. A tap that fails is dropped: the answer goes on without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corral.kit.log import get_log

if TYPE_CHECKING:
    from corral.relay.exchange import Exchange
    from corral.relay.head import AnswerHead

log = get_log(__name__)


def show_head(exchange: Exchange, head: AnswerHead) -> None:
    try:
        if exchange.tap is not None:
            exchange.tap.head(head.status, head.fields.headers)
    except Exception:
        drop_tap(exchange)


def show(exchange: Exchange, piece: bytes) -> None:
    try:
        if exchange.tap is not None:
            exchange.tap.data(piece)
    except Exception:
        drop_tap(exchange)


def drop_tap(exchange: Exchange) -> None:
    """Called while the tap's error is handled."""
    log.exception("a tap failed; the answer goes on without it")
    exchange.tap = None
