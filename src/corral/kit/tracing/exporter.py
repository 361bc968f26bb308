"""Builds the spans of finished requests and sends them to a collector, in a task of its own.

A request leaves a function that builds its spans; this costs it one entry of a list. The list is bounded: while the
collector cannot be reached, further requests are counted as dropped, and no request ever waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from corral.kit.log import get_log
from corral.kit.tasks import Wake
from corral.kit.tracing.otlp import CONTENT_TYPE, Resource, encode_request
from corral.kit.tracing.settings import TraceSettings

if TYPE_CHECKING:
    import aiohttp

log = get_log(__name__)

BuildSpans = Callable[[], Sequence[str]]  # encoded
_TIMEOUT_S = 10.0
_LAST_TIMEOUT_S = 0.8  # when the process stops
_MAX_REQUESTS_PER_BATCH = 400  # building and encoding the spans of that many takes a few milliseconds
_TRY_AGAIN = (429, 502, 503, 504)  # as OTLP says; any other refusal would come again


class SpanExporter:
    def __init__(self, settings: TraceSettings, resource: Resource) -> None:
        self._settings = settings
        self._resource = resource
        self._wake = Wake()
        self._url = f"{settings.traces_endpoint}/v1/traces"
        self._waiting: list[BuildSpans] = []
        self._last_error = ""
        self.before_sending: Callable[[], object] = _nothing  # adds requests that were not added yet
        self.on_sent: Callable[[int], object] = _ignore  # with the number of spans
        self.on_dropped: Callable[[int], object] = _ignore
        self.sent = 0  # spans
        self.dropped = 0  # entries whose spans were not sent

    def add(self, build: BuildSpans) -> None:
        if len(self._waiting) < self._settings.traces_limit:
            self._waiting.append(build)
            if len(self._waiting) == _MAX_REQUESTS_PER_BATCH:
                self._wake.set()
        else:
            self._drop(1)

    async def run(self) -> None:
        """Until it is cancelled; then it sends what is left, within a short time."""
        import aiohttp  # of a process that exports

        headers = dict(each.split("=", 1) for each in self._settings.traces_headers)
        headers["Content-Type"] = CONTENT_TYPE
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=True) as session:
            try:
                while True:
                    await self._wake.wait(self._settings.traces_interval_s)
                    await self._send_all(session, _TIMEOUT_S)
            finally:
                await self._send_all(session, _LAST_TIMEOUT_S)

    async def _send_all(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self.before_sending()
        while self._waiting:
            batch = self._waiting[:_MAX_REQUESTS_PER_BATCH]
            del self._waiting[: len(batch)]
            try:
                spans = [span for build in batch for span in build()]
            except Exception:
                log.exception("building spans failed")
                self._drop(len(batch))
                continue
            is_done = False
            try:
                is_done = await self._send(session, spans, len(batch), timeout_s)
            finally:
                if not is_done:
                    self._put_back(batch)
            if not is_done:
                return

    async def _send(self, session: aiohttp.ClientSession, spans: list[str], requests: int, timeout_s: float) -> bool:
        """False: the collector may take them later."""
        import aiohttp

        try:
            async with session.post(
                self._url,
                data=encode_request(self._resource, spans),
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                status, text = response.status, (await response.text())[:200]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._warn(str(error) or type(error).__name__)
            return False
        if status in _TRY_AGAIN:
            self._warn(f"status {status}")
            return False
        if status >= 300:
            self._warn(f"status {status}: {text}")
            self._drop(requests)
            return True
        self.sent += len(spans)
        self.on_sent(len(spans))
        self._last_error = ""
        return True

    def _put_back(self, batch: list[BuildSpans]) -> None:
        kept = (batch + self._waiting)[: self._settings.traces_limit]
        self._drop(len(batch) + len(self._waiting) - len(kept))
        self._waiting = kept

    def _drop(self, count: int) -> None:
        self.dropped += count
        self.on_dropped(count)

    def _warn(self, error: str) -> None:
        if error != self._last_error:  # once, not at every interval
            self._last_error = error
            log.warning("cannot send traces", collector=self._url, error=error)


def _nothing() -> None:
    pass


def _ignore(_: int) -> None:
    pass
