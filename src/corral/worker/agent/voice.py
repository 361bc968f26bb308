"""What the worker has to say on the bus, whichever connection there is at the moment.

Work outlives the connection it was ordered over, so whoever works keeps a `Voice`, not a bus. What cannot be said now
is not kept: outcomes stand in the next heartbeat, progress is followed by more progress.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from corral.bus.api import Bus
from corral.contract.codec import Message
from corral.contract.subjects import Event
from corral.kit.errors import CorralError, Unavailable
from corral.kit.log import get_log

log = get_log(__name__)
Told = TypeVar("Told", bound=Message)


class Voice:
    def __init__(self) -> None:
        self.node_id = ""  # the last one we had: an outcome belongs to the node that was told to do it
        self._bus: Bus | None = None

    @contextlib.contextmanager
    def over(self, bus: Bus, node_id: str) -> Iterator[None]:
        """Speak over this connection while the block runs."""
        self._bus, self.node_id = bus, node_id
        try:
            yield
        finally:
            self._bus = None

    async def say(self, event: Event[Told], message: Told, *, op: str) -> None:
        """Raises `Unavailable` and what else `Bus.publish` raises."""
        if self._bus is None:
            raise Unavailable("there is no connection to the bus")
        await self._bus.publish(event, message, node=self.node_id, op=op)

    async def try_to_say(self, event: Event[Told], message: Told, *, op: str) -> bool:
        try:
            await self.say(event, message, op=op)
        except CorralError as error:
            log.warning("not told over the bus", what=event.subject.template, op=op, reason=error.message)
            return False
        return True
