"""What a gateway tells of each request it served: `POST /internal/receipts`, in batches
(docs/reference/wire/internal.md#receipts)."""

from __future__ import annotations

import msgspec

from corral.contract.codec import Message, always

MAX_ERROR_TEXT = 200  # characters
CLIENT_GONE = 499  # as in nginx: the client left before the response was complete


def is_failure(status: int, ending: str) -> bool:
    """Whether the fleet failed the client. A client that left by itself is no failure."""
    return (status >= 400 and status != CLIENT_GONE) or ending == "upstream_broke"


class Receipt(Message, frozen=True):
    id: str = always(str)  # the request's id, as the client saw it
    at: float = always(float)  # seconds since the epoch, on the controller's clock, when it came
    key_id: str = always(str)
    model: str = always(str)  # as asked for
    path: str = always(str)  # /v1/chat/completions
    status: int = always(int)
    served_by: str = ""  # another model, where an alias or a stand-in answered
    node_id: str = ""
    process_id: str = ""
    replica: int = 0
    revision: str = ""
    digest: str = ""  # of the backend
    queue_ms: float = 0.0  # waiting for a slot
    load_ms: float = 0.0  # waiting for a cold model
    # From the request to the first event of a streamed answer that has content, reasoning or a part of a tool call;
    # 0: the answer is not streamed, or had none.
    first_byte_ms: float = 0.0
    total_ms: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: bool = False  # the answer did not tell its usage: completion tokens are counted events
    streamed: bool = False
    ending: str = ""  # empty: whole; client_left, upstream_broke
    tries: int = 1
    # Of a request that the gateway itself refused or gave up: the code of its answer (`upstream_failed`, `model_busy`),
    # and one line of text. Both are empty where an engine answered: what it says may contain parts of a prompt.
    error: str = ""
    error_text: str = ""  # at most MAX_ERROR_TEXT characters
    # Times that a replica broke the stream off and the gateway completed it, on another replica or, where only the end
    # was missing, by itself. Node and process are those of the last replica.
    resumed: int = 0


class Receipts(Message, frozen=True):
    gateway: str = ""  # made up by it when it starts
    receipts: tuple[Receipt, ...] = always(tuple)
    dropped: int = 0  # that found no room since the last batch
    # Requests that wait at this gateway right now, by model. A batch comes at least once a second while there are any,
    # and one without them after the last.
    waiting: dict[str, int] = msgspec.field(default_factory=lambda: dict[str, int]())
    # Prompts since the last batch that did not go to the replica which knows their beginning, because it had too much
    # to do (docs/reference/wire/routing.md#prefix-cache), by model.
    pressure: dict[str, int] = msgspec.field(default_factory=lambda: dict[str, int]())


class RequestView(Message, frozen=True, omit_defaults=False):
    """One request as `GET /api/requests` shows it."""

    id: str
    at: str  # RFC 3339
    key_id: str
    key: str  # its name; empty: it is gone
    model: str
    served_by: str
    path: str
    status: int
    node_id: str
    node: str
    process_id: str
    replica: int
    revision: str
    digest: str
    queue_ms: float
    load_ms: float
    first_byte_ms: float  # as `Receipt` has it
    total_ms: float
    prompt_tokens: int
    completion_tokens: int
    estimated: bool
    streamed: bool
    ending: str
    tries: int
    error: str = ""  # as `Receipt` has it
    error_text: str = ""  # empty where a key reads its own requests: the text names addresses inside the fleet
    resumed: int = 0  # as `Receipt` has it


def parse_statuses(text: str) -> tuple[int, int]:
    """The first status, and the one after the last: of `503`, or of a class like `5xx`. Raises ValueError."""
    if len(text) == 3 and text.isascii() and text[0] in "12345":
        if text[1:].lower() == "xx":
            return int(text[0]) * 100, int(text[0]) * 100 + 100
        if text.isdecimal():
            return int(text), int(text) + 1
    raise ValueError("status: give a code like 503, or a class like 4xx or 5xx")


class RequestList(Message, frozen=True, omit_defaults=False):
    requests: tuple[RequestView, ...] = ()
    next: str = ""  # ask for `before` this to go on; empty: there are no more


MAX_RUNNING = 200  # requests under way that a gateway process reports, and that a list has: the oldest ones


class RunningRequest(Message, frozen=True):
    """One request under way, as its gateway reports it."""

    id: str = always(str)
    at: float = always(float)  # seconds since the epoch, on the controller's clock, when it came
    key_id: str = always(str)
    model: str = always(str)  # as asked for
    path: str = always(str)
    served_by: str = ""  # another model, where an alias or a stand-in answers
    node_id: str = ""  # empty: it waits for a load or for a slot
    process_id: str = ""
    replica: int = 0
    tokens: int = 0  # of a stream so far: its events, counted


class RunningReport(Message, frozen=True):
    """`POST /internal/running`, while somebody looks: of one process of a gateway."""

    gateway: str = always(str)  # made up by the process when it starts
    requests: tuple[RunningRequest, ...] = always(tuple)  # the oldest ones first, at most MAX_RUNNING
    total: int = always(int)


class RunningView(Message, frozen=True, omit_defaults=False):
    """One request under way as `GET /api/requests/running` shows it."""

    id: str
    at: str  # RFC 3339
    running_ms: float
    state: str  # waiting: for a load or for a slot; running: a replica has it
    key_id: str
    key: str
    model: str
    served_by: str
    path: str
    node_id: str
    node: str
    process_id: str
    replica: int
    tokens: int  # of a stream so far, counted by the gateway


class RunningList(Message, frozen=True, omit_defaults=False):
    requests: tuple[RunningView, ...] = ()  # the oldest ones first
    total: int = 0  # under way at all gateways, also those that are not listed
