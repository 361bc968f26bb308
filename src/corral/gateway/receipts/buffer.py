"""Receipts: one record per finished request, buffered until `sender.py` sends them to the controller
(docs/reference/wire/internal.md#receipts).

A request on the fast path leaves a tuple; the gateway makes receipts of some hundred tuples at a time. The buffer is
bounded: receipts that do not fit until the next batch are counted, not kept.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from corral.contract.codec import encode
from corral.contract.receipts import Receipt
from corral.gateway.receipts.usage import StreamSummary, read_plain_usage
from corral.gateway.routing.replicas import ReplicaTarget, Route
from corral.gateway.view.fleet import Client

if TYPE_CHECKING:
    from corral.gateway.receipts.spans import RequestSpanTemplates, RequestTrace

_NO_TOKENS = (0, 0)


class ReceiptTemplate:
    """What the receipts of all requests of one client to one replica have in common."""

    __slots__ = ("_start", "client", "counter", "path", "route", "span_templates")
    # Of a template that is made for a single, traced request: its trace, and the template for all requests.
    trace: RequestTrace | None = None
    shared: ReceiptTemplate | None = None

    def __init__(self, client: Client, route: Route, path: bytes) -> None:
        self.client = client
        self.route = route
        self.counter = route.counter
        self.path = path  # of the client's request
        self._start = b""
        self.span_templates: RequestSpanTemplates | None = None  # made when the first request is traced

    def start(self) -> bytes:
        """The beginning of the JSON of each receipt: the fields that are the same in all of them."""
        if self.shared is not None:
            return self.shared.start()
        if not self._start:
            receipt = encode(
                served_by(
                    self.route.replica,
                    id="",
                    key_id=self.client.key_id,
                    model=self.route.requested_model,
                    path=self.path.decode("latin-1"),
                )
            )
            fields = msgspec.json.decode(receipt, type=dict[str, msgspec.Raw])
            for name in ("id", "at", "status"):  # these differ
                del fields[name]
            self._start = encode(fields)[:-1]
        return self._start


# A request that ended on the fast path: the template, its id, status, monotonic start and end, and both ends of the
# response, or the summary of a stream. A bare tuple, because one is made for every request.
FinishedRequest: TypeAlias = tuple[ReceiptTemplate, bytes, int, float, float, bytes | StreamSummary]


# Microseconds with an exponent: formatting whole numbers takes a fraction of the time of decimal places.
_RECEIPT = b'%b,"id":"%b","at":%de-6,"status":%d,"total_ms":%de-3,"prompt_tokens":%d,"completion_tokens":%d}'
_STREAM_RECEIPT = _RECEIPT[:-1] + b"%b%b%b}"


def write_receipt(request: FinishedRequest, wall_minus_monotonic: float) -> bytes:
    """The JSON of one receipt, formatted directly: building and encoding an object takes three times as long. The id
    needs no escapes: the relay accepts and creates only plain ones."""
    template, request_id, status, started, ended, response = request
    if not isinstance(response, bytes):
        usage, first_s, streamed = response
        return _STREAM_RECEIPT % (
            template.start(),
            request_id,
            int((started + wall_minus_monotonic) * 1e6),
            status,
            int((ended - started) * 1e6),
            usage.prompt,
            usage.completion,
            b',"first_byte_ms":%.3f' % (first_s * 1000) if first_s is not None else b"",
            b',"estimated":true' if usage.estimated else b"",
            b',"streamed":true' if streamed else b"",
        )
    prompt, completion = (read_plain_usage(response) if status < 400 else None) or _NO_TOKENS
    return _RECEIPT % (
        template.start(),
        request_id,
        int((started + wall_minus_monotonic) * 1e6),
        status,
        int((ended - started) * 1e6),
        prompt,
        completion,
    )


class ReceiptBuffer:
    """Keeps at most `limit` receipts, encoded. When it is full, new ones are dropped and counted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.offset_s = time.time() - time.monotonic()  # of the controller's clock; set by the sender
        self.dropped = 0  # not yet reported to the controller
        self.lost = 0  # since the start
        self._receipts: list[bytes] = []

    def add(self, receipt: Receipt) -> None:
        if len(self._receipts) < self.limit:
            self._receipts.append(encode(receipt))
        else:
            self._drop(1)

    def add_finished(self, requests: list[FinishedRequest]) -> None:
        free = max(0, self.limit - len(self._receipts))
        if len(requests) > free:
            self._drop(len(requests) - free)
            requests = requests[:free]
        self._receipts += [write_receipt(each, self.offset_s) for each in requests]

    def take(self) -> list[bytes]:
        taken, self._receipts = self._receipts, []
        return taken

    def put_back(self, unsent: list[bytes]) -> None:
        """Keep receipts that could not be sent, before those that were added meanwhile."""
        kept = (unsent + self._receipts)[: self.limit]
        self._drop(len(unsent) + len(self._receipts) - len(kept))
        self._receipts = kept

    def _drop(self, count: int) -> None:
        self.dropped += count
        self.lost += count


def served_by(replica: ReplicaTarget | None, **fields: object) -> Receipt:
    """A receipt with the fields of the replica that served the request."""
    if replica is None:
        return Receipt(**fields)  # type: ignore[arg-type]  # names and types are those of the caller
    seen = replica.seen
    return Receipt(
        **fields,  # type: ignore[arg-type]
        served_by="" if seen.model == fields["model"] else seen.model,
        node_id=seen.node_id,
        process_id=seen.process_id,
        replica=seen.replica,
        revision=seen.revision,
        digest=seen.digest,
    )
