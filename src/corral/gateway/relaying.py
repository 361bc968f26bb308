"""What the gateway's relayed routes have in common: an answer sent, a relay counted, a failure given a status."""

from __future__ import annotations

from corral.contract.http import Headers, RelayResult, Responder, UpstreamFailed
from corral.gateway.answers import Answer
from corral.gateway.metrics import CLIENT_GONE, RouteCounts


async def send(responder: Responder, answer: Answer, extra: Headers = ()) -> int:
    await responder.send(answer.status, (*answer.headers, *extra), answer.body)
    return answer.status


def settle(counts: RouteCounts, result: RelayResult, first_s: float | None) -> int:
    """Count how a relayed answer went; the status to count is the upstream's, unless nobody was there to receive it.
    `first_s`: what counts as the time to its first byte; None: nothing does."""
    if result.status and first_s is not None:
        counts.first_byte.observe(first_s)
    return CLIENT_GONE if result.client_gone else result.status


def status_of(failure: UpstreamFailed) -> int:
    """503: nothing happened, try again. 504 and 502: it was asked, and may have acted."""
    if failure.refused:
        return 503
    return 504 if failure.timed_out else 502
