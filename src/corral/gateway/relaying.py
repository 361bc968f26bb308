"""What the gateway's relayed routes have in common: an answer sent, a relay counted, a failure put into words."""

from __future__ import annotations

from dataclasses import dataclass

from corral.contract.http import Headers, RelayResult, Responder, UpstreamFailed
from corral.gateway.answers import Answer
from corral.gateway.metrics import CLIENT_GONE, RelayCounts, RouteCounts


async def send(responder: Responder, answer: Answer, extra: Headers = ()) -> int:
    await responder.send(answer.status, (*answer.headers, *extra), answer.body)
    return answer.status


@dataclass(frozen=True, slots=True)
class RelayLedger:
    """Counts the relays of one class of routes."""

    route: RouteCounts
    relay: RelayCounts

    def done(self, result: RelayResult) -> int:
        """The status to count: the upstream's, unless nobody was there to receive it."""
        if result.status:
            self.route.first_byte.observe(result.first_byte_s)
        self.relay.bytes_sent += result.bytes_sent
        if result.complete:
            return result.status
        if result.client_gone:
            return CLIENT_GONE
        self.relay.broken += 1
        return result.status

    def failed(self, failure: UpstreamFailed) -> None:
        if failure.refused:
            self.relay.refused += 1
        elif failure.timed_out:
            self.relay.timed_out += 1
        else:
            self.relay.failed += 1


def status_of(failure: UpstreamFailed) -> int:
    """503: nothing happened, try again. 504 and 502: it was asked, and may have acted."""
    if failure.refused:
        return 503
    return 504 if failure.timed_out else 502
