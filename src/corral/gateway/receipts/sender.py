"""Sends receipts to the controller in batches, with the number of waiting requests and of prefix misses by model."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from corral.contract.codec import encode
from corral.gateway.receipts.buffer import ReceiptBuffer
from corral.gateway.receipts.metrics import RouteCounts
from corral.gateway.view.controller_link import ControllerLink
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log

log = get_log(__name__)

_BATCH_BYTES = 512 * 1024  # half of the controller's limit for a body


class ReceiptSender:
    def __init__(
        self,
        receipts: ReceiptBuffer,
        counts: RouteCounts,
        client: ControllerLink,
        clock: Clock,
        server_now: Callable[[], float],
        waiting: Callable[[], dict[str, int]],
        *,
        interval_s: float,
        take_pressure: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """`waiting`: the number of waiting requests by model; `take_pressure`: prefix misses by model since the last
        call."""
        self._receipts = receipts
        self._counts = counts
        self._client = client
        self._clock = clock
        self._server_now = server_now
        self._waiting = waiting
        self._take_pressure = take_pressure
        self._interval_s = interval_s
        self._gateway = secrets.token_hex(8)
        self._reported_waiting = False
        self._last_error = ""

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            await self.run_once()

    async def run_once(self) -> None:
        """Send all receipts. Those that cannot be sent stay in the buffer, as far as they fit."""
        buffer = self._receipts
        buffer.offset_s = self._server_now() - self._clock.monotonic()
        self._counts.count_finished()  # moves finished requests to the buffer
        # Misses that cannot be reported are dropped: while there are too few replicas, more follow.
        unsent, waiting, pressure = buffer.take(), self._waiting(), self._take_pressure()
        try:
            while unsent or buffer.dropped or waiting or pressure or self._reported_waiting:
                count = _batch_size(unsent)
                await self._send_one(unsent[:count], waiting, pressure)
                self._reported_waiting, pressure = bool(waiting), {}
                del unsent[:count]
                if not unsent:
                    break
            self._last_error = ""
        except CorralError as error:
            if self._last_error != error.code:  # once, not once a second
                self._last_error = error.code
                log.warning("cannot send receipts for now", error=error.message, unsent=len(unsent))
        except Exception:
            log.exception("sending receipts failed")
        finally:
            buffer.put_back(unsent)

    async def _send_one(self, receipts: list[bytes], waiting: dict[str, int], pressure: dict[str, int]) -> None:
        dropped = self._receipts.dropped
        report = encode({"gateway": self._gateway, "dropped": dropped, "waiting": waiting, "pressure": pressure})
        await self._client.send_receipts(b'%b,"receipts":[%b]}' % (report[:-1], b",".join(receipts)))
        self._receipts.dropped -= dropped


def _batch_size(unsent: list[bytes]) -> int:
    """The number of receipts for one batch: at least one."""
    size = 0
    for count, receipt in enumerate(unsent):
        size += len(receipt) + 1
        if size > _BATCH_BYTES and count:
            return count
    return len(unsent)
