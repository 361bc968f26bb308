"""What `corral top` knows about the fleet. No I/O: `feed.py` fills it, the other modules read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from corral.client.events import FleetEvent
    from corral.contract.admin import NodeView, OperationView
    from corral.contract.catalogue import ModelView
    from corral.contract.receipts import RequestView, RunningView

T = TypeVar("T")
RATE_WINDOW_S = 60.0


class ReportedViews(Generic[T]):
    """Views by id, as the event stream reports them. After a reconnect the stream reports every view again; views that
    it does not report are gone."""

    def __init__(self) -> None:
        self._views: dict[str, T] = {}
        self._reported: set[str] | None = None

    def __iter__(self) -> Iterator[T]:
        return iter(self._views.values())

    def __len__(self) -> int:
        return len(self._views)

    def get(self, id: str) -> T | None:
        return self._views.get(id)

    def restart(self) -> None:
        self._reported = set()

    def put(self, id: str, view: T) -> None:
        self._views[id] = view
        if self._reported is not None:
            self._reported.add(id)

    def remove(self, id: str) -> None:
        self._views.pop(id, None)

    def complete(self) -> None:
        if self._reported is not None:
            self._views = {id: view for id, view in self._views.items() if id in self._reported}
        self._reported = None

    def replace(self, views: Mapping[str, T]) -> None:
        """All views, where they were read instead of reported."""
        self._views = dict(views)


@dataclass(frozen=True)
class RequestRates:
    """Of the last minute, or of the span of the newest receipts if they cover less."""

    window_s: float = 0.0
    requests: int = 0
    failed: int = 0
    tokens_per_s: float = 0.0
    first_token_ms: float = 0.0  # median of streamed answers

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.window_s if self.window_s else 0.0


@dataclass
class FleetState:
    url: str = ""
    context: str = ""
    key_name: str = ""
    role: str = ""
    nodes: ReportedViews[NodeView] = field(default_factory=ReportedViews)
    operations: ReportedViews[OperationView] = field(default_factory=ReportedViews)
    models: Sequence[ModelView] = ()
    replicas: Sequence[Mapping[str, Any]] = ()
    requests: Sequence[RequestView] = ()  # newest first
    running: Sequence[RunningView] = ()  # requests under way, the oldest first
    running_total: int = 0  # also those that are not listed
    attention: Sequence[str] = ()
    node_logs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # names of logs by node, where they were asked
    live: bool = False  # the event stream is open and its initial state is complete
    problem: str = ""  # why the data may be old
    is_stale: set[str] = field(default_factory=set)  # kinds that the event stream reported as changed

    @property
    def may_act(self) -> bool:
        """Viewers see everything and change nothing."""
        return self.role == "admin"

    def apply(self, event: FleetEvent) -> None:
        from corral.client import events

        match event:
            case events.Restarted():
                self.nodes.restart()
                self.operations.restart()
            case events.NodeSeen(node=node):
                self.nodes.put(node.id, node)
            case events.NodeRemoved(id=gone):
                self.nodes.remove(gone)
            case events.OperationSeen(operation=view):
                self.operations.put(view.job_id, view)
            case events.OperationRemoved(id=gone):
                self.operations.remove(gone)
            case events.Changed(kind=kind):
                self.is_stale.add(kind)
            case events.StateComplete():
                self.nodes.complete()
                self.operations.complete()
                self.live, self.problem = True, ""
            case events.Lost(reason=reason):
                self.live, self.problem = False, f"lost the connection ({reason}); retrying"

    def nodes_by_status(self) -> Counter[str]:
        return Counter(node.status for node in self.nodes)


def request_rates(requests: Sequence[RequestView], now: datetime, *, is_whole: bool) -> RequestRates:
    """`is_whole`: there are no older receipts than these. Pure."""
    from corral.contract.receipts import is_failure  # as late as the rest of the contract here

    recent: list[RequestView] = []
    ages: list[float] = []
    for each in requests:
        age_s = (now - datetime.fromisoformat(each.at)).total_seconds()
        if age_s > RATE_WINDOW_S:
            break
        recent.append(each)
        ages.append(max(age_s, 0.0))
    covers_all = is_whole or len(recent) < len(requests)
    window_s = RATE_WINDOW_S if covers_all or not ages else max(ages[-1], 1.0)
    first = sorted(each.first_byte_ms for each in recent if each.first_byte_ms)
    return RequestRates(
        window_s=window_s,
        requests=len(recent),
        failed=sum(is_failure(each.status, each.ending) for each in recent),
        tokens_per_s=sum(each.completion_tokens for each in recent) / window_s,
        first_token_ms=first[len(first) // 2] if first else 0.0,
    )
