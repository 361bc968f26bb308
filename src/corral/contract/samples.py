"""What `GET /api/samples` answers: how the fleet, a model or a node did over time."""

from __future__ import annotations

from corral.contract.codec import Message


class SamplePoint(Message, frozen=True, omit_defaults=False):
    """One interval. Counts are of requests that ended in it; null: nothing was measured."""

    at: str  # RFC 3339, its beginning
    seconds: float  # its length; the last one may be shorter than the others
    requests: int = 0
    errors: int = 0  # answered with status 400 or higher, or broken off by the replica
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_p50_ms: float | None = None  # of streamed answers
    first_token_p95_ms: float | None = None
    queue_p50_ms: float | None = None  # of requests that waited for a slot
    queue_p95_ms: float | None = None
    waiting: float | None = None  # requests that waited at gateways, on average
    waiting_most: float | None = None
    in_flight: float | None = None  # requests in flight at replicas, on average
    ram_used_bytes: float | None = None
    ram_bytes: float | None = None
    device_used_bytes: float | None = None
    device_bytes: float | None = None
    temperature_c: float | None = None  # of the hottest device
    power_w: float | None = None  # of all devices


class SampleSeries(Message, frozen=True, omit_defaults=False):
    kind: str
    name: str
    since: str  # RFC 3339
    until: str
    step_s: int
    points: tuple[SamplePoint, ...] = ()
