"""Models and schedules as the admin API shows and takes them, for the API, the client and the CLI.

Schedules are LocalAI's (docs/reference/wire/http-nodes.md#schedules), and so are `config_revision` and
`pending_cleanup` of models (docs/reference/wire/routing.md#revision); the rest is ours.
"""

from __future__ import annotations

from typing import Any

import msgspec

from corral.contract.codec import Message, always
from corral.contract.messages.staging import RemovedFiles


class ScheduleView(Message, frozen=True):
    """A stored scheduling config, as the contract has it."""

    id: str = always(str)
    model_name: str = always(str)
    node_selector: str = always(str)  # JSON of the map, inside a text; empty: any node
    min_replicas: int = always(int)
    max_replicas: int = always(int)  # 0: no bound
    spread_all: bool = always(bool)
    route_policy: str = always(str)
    balance_abs_threshold: int = always(int)
    balance_rel_threshold: float = always(float)
    min_prefix_match: float = always(float)
    unsatisfiable_until: str = ""
    unsatisfiable_ticks: int = always(int)
    created_at: str = always(str)
    updated_at: str = always(str)


class ScheduleBody(Message, frozen=True):
    """`POST /api/nodes/scheduling`. What stands before `route_policy` is replaced whole; from there on, what is left
    out stays as it is stored."""

    model_name: str = always(str)
    node_selector: dict[str, str] | None = None
    min_replicas: int = 0
    max_replicas: int = 0
    spread_all: bool = False
    route_policy: str | None = None  # "", round_robin, prefix_cache
    balance_abs_threshold: int | None = None
    balance_rel_threshold: float | None = None
    min_prefix_match: float | None = None


class ModelView(Message, frozen=True):
    id: str = always(str)
    backend: str = always(str)
    config_revision: str = always(str)
    origin: str = always(str)  # person, gallery, file
    created_at: str = always(str)
    updated_at: str = always(str)
    row_version: int = always(int)
    source: str = ""  # gallery@entry, or the file
    created_by: str = ""
    alias: str = ""
    description: str = ""
    context_size: int = 0
    files: int = 0
    size_bytes: int = 0  # of its files, as far as it is known: fetched, on the controller's disk, or declared
    tags: tuple[str, ...] = ()
    pinned: bool = False
    disabled: bool = False
    ready: int = always(int)  # replicas that can answer now
    schedule: ScheduleView | None = None
    definition: dict[str, Any] = msgspec.field(default_factory=dict)  # whole; only where one model is shown
    resume_streams: bool = False  # its definition asks that streams which break off are continued


class InstallModel(Message, frozen=True):
    """`POST /api/models`: out of a gallery, or a definition of one's own."""

    model: str = ""  # name in a gallery, or gallery@name
    variant: str = ""  # this one of its variants; empty: the one that suits the fleet; its own name: itself
    definition: dict[str, Any] = msgspec.field(default_factory=dict)
    text: str = ""  # the definition as YAML
    name: str = ""  # what it shall be called here
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)  # laid over the definition; null takes a key away
    replace: bool = False  # though there is one of that name
    recreate: bool = False  # of a replacement: do not wait for the new revision before the old one goes
    fetch: bool = False  # its files now, not when the first request needs them
    source: str = ""  # hf://…, https://…: derive the definition; with a definition: where that came from
    quant: str = ""  # of the source: this quantisation instead of the best that fits
    soak: str = ""  # of a replacement: try the new revision beside the old one; the rest is as in `EditModel`
    max_errors: str = ""
    max_slowdown: float = 0.0
    min_requests: int = 0


class EditModel(Message, frozen=True):
    """`PUT` with `definition` or `text`: exactly this. `PATCH` with `changes`: laid over what is there."""

    definition: dict[str, Any] = msgspec.field(default_factory=dict)
    text: str = ""
    changes: dict[str, Any] = msgspec.field(default_factory=dict)
    recreate: bool = False
    row_version: int = 0  # only if it is still this one; 0: whichever it is
    soak: str = ""  # 5m, or 200 requests: try the new revision beside the old one (docs/reference/rollouts.md)
    max_errors: str = ""  # limits of the soak; empty or 0: the default
    max_slowdown: float = 0.0
    min_requests: int = 0


class ModelChanged(Message, frozen=True):
    """What installing, editing and deleting answer."""

    id: str = always(str)
    config_revision: str = always(str)
    pending_cleanup: bool = always(bool)  # processes of another revision are still there; they go by themselves
    message: str = always(str)
    changed: bool = always(bool)  # False: it was so already
    notes: tuple[str, ...] = ()  # for users: a backend that no gallery has, an alias without a model
    job_id: str = ""  # of the operation that fetches its files, where that was asked and there are any to fetch
    rollout_id: str = ""  # of the operation that tries the new revision


class AvailableModel(Message, frozen=True):
    """An entry of a gallery, as far as people are shown it."""

    name: str = always(str)
    id: str = always(str)  # gallery@name
    gallery: str = always(str)
    description: str = ""
    license: str = ""
    backend: str = ""  # as far as the entry itself says
    size: str = ""
    urls: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    files: int = 0
    variants: tuple[str, ...] = ()
    installed: bool = always(bool)
    definition: dict[str, Any] = msgspec.field(default_factory=dict)  # whole; only where one entry is shown
    size_bytes: int = 0  # of its files; 0: not known
    fits_on: tuple[str, ...] = ()  # names of the nodes that can hold it, the best first; only of built-in models
    fit_note: str = ""  # why it fits on no node, or why that is not known


class ModelFileView(Message, frozen=True):
    """One file of a model."""

    path: str = always(str)  # as the definition names it
    size_bytes: int = always(int)  # 0: not known yet
    digest: str = ""  # sha256:…; empty: not known yet
    source: str = ""  # where the controller fetches it
    controller_bytes: int = 0  # of it on the controller that answers


class NodeFilesView(Message, frozen=True):
    """A model's files on one node."""

    node_id: str = always(str)
    node_name: str = always(str)
    state: str = always(str)  # whole, partial, none, unknown
    have_bytes: int = always(int)
    total_bytes: int = always(int)
    free_bytes: int = 0  # on the disk of its models folder
    files: tuple[int, ...] = ()  # bytes of each file, in the order of `ModelFilesView.files`
    reason: str = ""  # why the state is unknown


class ModelFilesView(Message, frozen=True):
    """`GET /api/models/{model}/files`."""

    model: str = always(str)
    files: tuple[ModelFileView, ...] = always(tuple)
    nodes: tuple[NodeFilesView, ...] = always(tuple)
    size_bytes: int = always(int)
    note: str = ""  # why less is known than there is


class StageBody(Message, frozen=True):
    """`POST /api/models/{model}/stage`: to which nodes; with neither field, every node."""

    node: str = ""
    selector: str = ""


class CollectedOn(Message, frozen=True):
    """What a cleanup removed on the controller or on one node."""

    node_id: str = always(str)  # `controller`, or a node
    node_name: str = always(str)
    removed: tuple[RemovedFiles, ...] = always(tuple)
    freed_bytes: int = always(int)
    error: str = ""  # why nothing could be removed there


class CollectedView(Message, frozen=True):
    """`POST /api/models/gc`. With `dry_run` nothing was removed: the same would be."""

    dry_run: bool = always(bool)
    freed_bytes: int = always(int)
    places: tuple[CollectedOn, ...] = always(tuple)
