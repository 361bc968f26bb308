"""Lets an editor decide what the client is sent of a response. The editor takes the place of the tap, which then
observes what is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corral.contract.http import Headers, StreamEditor, Tap
from corral.relay.taps import show

if TYPE_CHECKING:
    from corral.relay.exchange import Exchange


class EditorTap:
    """Implements `Tap`, for one response. The bytes that the upstream's connection passes on are dropped meanwhile."""

    raw = False  # an editor gets bodies without their framing

    def __init__(self, exchange: Exchange, editor: StreamEditor, tap: Tap | None) -> None:
        self._exchange = exchange
        self._editor = editor
        self.tap = tap
        self._is_later = exchange.edited
        self._accepts = False

    def head(self, status: int, headers: Headers) -> None:
        self._accepts = self._editor.head(status, headers)
        if self._is_later:
            return
        self._exchange.edited = self._accepts
        if self.tap is not None:
            self.tap.head(status, headers)

    def data(self, chunk: bytes) -> None:
        if self._accepts:
            chunk = self._editor.data(chunk)
        elif self._is_later:
            return
        if chunk:
            show(self, chunk)
            if self._accepts:
                self._exchange.send_edited(chunk)
