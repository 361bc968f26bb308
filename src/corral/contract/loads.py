"""Cold loads as gateways and people see them: `POST /internal/loads`, `GET /internal/loads/{model}`, and LocalAI's
`loading` object (docs/reference/wire/routing.md#answer-while-a-model-loads). A load belongs to the
controller: it continues when the client that requested it leaves."""

from __future__ import annotations

from enum import StrEnum

from corral.contract.codec import Message, always


class LoadState(StrEnum):
    PENDING = "pending"  # a place is looked for
    INSTALLING = "installing"  # its backend, on the node that was chosen
    STAGING = "staging"  # its files
    LOADING = "loading"  # its process starts and reads the weights
    FAILED = "failed"  # kept for a while, so that waiting clients get the cause
    LOADED = "loaded"  # there is a replica to ask; never stored


class AskForLoad(Message, frozen=True):
    model: str = always(str)


class LoadStatus(Message, frozen=True):
    model: str = always(str)
    state: str = always(str)  # a LoadState
    node: str = ""  # by name
    progress: float = 0.0  # percent, over all files
    bytes_sent: int = 0
    total_bytes: int = 0
    file_index: int = 0
    total_files: int = 0
    eta_seconds: float | None = None
    message: str = ""  # a sentence for people: what is being waited for
    error: str = ""  # of a failed one: the real cause, with the last lines of the process
    retry_after_s: float = 0.0  # of a failed one: when a request may start the next try
    version: int = 0  # rises with each change: `?since=` waits for a higher one
