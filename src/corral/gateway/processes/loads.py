"""`inflight.py` for several processes: how many requests a replica has under way, counted over all of them.

Each process counts its own requests in its column of the replica's row. The parent's column also holds those of other
gateways, as the node reports them. A process sees the others' requests when it takes a slot, which decides whether it
may keep the slot, and when it refreshes; in between, its ranks are a few milliseconds old.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping

from corral.gateway.inflight import Ejection, InFlight, Load
from corral.gateway.pick import BUSY
from corral.gateway.processes.table import PARENT, SharedTable

_PEAK = 1 << 20  # a peak cell is the number of the node's report, times this, plus the peak since that report


def row_name(process_id: str) -> str:
    return f"replica {process_id}"


class SharedLoad(Load):
    """The second number of a row is the most requests a process had under way since the node's last report (`_PEAK`);
    in the parent's column, the number of that report."""

    __slots__ = (
        "_cells",
        "_children",
        "_epoch",
        "_last_own",
        "_others_at",
        "_own_at",
        "_peak_at",
        "_report_at",
        "_told",
    )

    def __init__(self, node_id: str, columns: int) -> None:
        super().__init__(node_id)
        self._told = 0  # requests of other gateways; only the parent hears of them
        self._epoch = 0.0
        self._last_own = [0] * columns  # of each process, at the last report
        # Of a row of its own, until it is bound: where the table is full, a process goes by its own requests.
        self._cells = memoryview(array("d", [0.0] * 2 * columns)).cast("B").cast("d")
        self._place(0, columns, PARENT)

    def _place(self, first: int, columns: int, column: int) -> None:
        self._own_at = first + column
        self._others_at = tuple(first + each for each in range(columns) if each != column)
        self._children = range(first + 1, first + columns)
        self._report_at = first + columns
        self._peak_at = first + columns + column

    def bind(self, table: SharedTable, row: int) -> None:
        if self._cells is table.cells and self._own_at == table.first(row) + table.column:
            return
        self._cells = table.cells
        self._place(table.first(row), table.columns, table.column)
        self._epoch = self._cells[self._report_at]
        self._cells[self._own_at] = self.own + self._told

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        """Another process took the last slot in the same moment: this one has to be given back."""
        return self.own + self._others > self._slots

    def begin(self) -> None:
        cells = self._cells
        own = self.own = self.own + 1
        cells[self._own_at] = own + self._told
        report = cells[self._report_at]
        if own > self._peak or report != self._epoch:
            self._peak, self._epoch = own, report
            if self._peak_at != self._report_at:
                cells[self._peak_at] = report * _PEAK + own
        others: float = self._told  # as in `refresh`, without the call: this is the warm path
        for at in self._others_at:
            others += cells[at]
        load = own + int(others)
        self._others = load - own
        self._ranks[self._index] = self._base + (load if load < self._slots else load + BUSY)

    def end(self) -> None:
        own = self.own = self.own - 1
        self._cells[self._own_at] = own + self._told
        load = own + self._others
        self._ranks[self._index] = self._base + (load if load < self._slots else load + BUSY)
        if self._queue.waiting:
            self._queue.freed()

    def refresh(self) -> None:
        """Read what the other processes have under way."""
        cells = self._cells
        others: float = self._told
        for at in self._others_at:
            others += cells[at]
        self._others = int(others)
        load = self.own + self._others
        self._ranks[self._index] = self._base + (load if load < self._slots else load + BUSY)

    def told(self, in_flight: int) -> None:
        """In the parent: the node's own count, those of all our processes among it (`Load.told` says why peaks)."""
        cells, report = self._cells, self._cells[self._report_at]
        ours = self.own
        for number, at in enumerate(self._children, 1):
            epoch, peak = divmod(cells[at + len(self._last_own)], _PEAK)
            now = int(cells[at])
            ours += max(now, int(peak) if epoch == report else self._last_own[number])
            self._last_own[number] = now
        self._told = max(0, in_flight - ours)
        cells[self._report_at] = report + 1
        cells[self._own_at] = self.own + self._told
        self.refresh()
        if self._queue.waiting:
            self._queue.freed()


class SharedInFlight(InFlight):
    def __init__(self, table: SharedTable) -> None:
        super().__init__()
        self._table = table
        self._rows: Mapping[str, int] = {}

    def use(self, rows: Mapping[str, int]) -> None:
        """Before a view is taken over: the rows of its replicas."""
        self._rows = rows

    def load(self, process_id: str, node_id: str) -> Load:
        load = super().load(process_id, node_id)
        row = self._rows.get(row_name(process_id))
        if row is not None and isinstance(load, SharedLoad):
            load.bind(self._table, row)
        return load

    def new_load(self, node_id: str) -> Load:
        return SharedLoad(node_id, self._table.columns)


class SharedEjection(Ejection):
    """In a child: a replica or node that this process could not reach is left alone by all of them, also by the parent
    when it serves those who wait."""

    tell: Callable[[str, str], None]  # what happened, and the id of the process or node; set before the first request
    _is_hearing = False

    def process(self, process_id: str) -> None:
        before = self.count
        super().process(process_id)
        if self.count != before:
            self._say("process", process_id)

    def node(self, node_id: str) -> None:
        before = self.count
        super().node(node_id)
        if self.count != before:
            self._say("node", node_id)

    def hold(self, node_id: str) -> None:
        super().hold(node_id)
        self._say("hold", node_id)

    def release(self, node_id: str) -> None:
        super().release(node_id)
        self._say("release", node_id)

    def _say(self, what: str, which: str) -> None:
        if not self._is_hearing:
            self.tell(what, which)

    def hear(self, what: str, which: str) -> None:
        """Of another process, which has counted it."""
        count, self._is_hearing = self.count, True
        try:
            apply_ejection(self, what, which)
        finally:
            self.count, self._is_hearing = count, False


def apply_ejection(ejection: Ejection, what: str, which: str) -> None:
    match what:
        case "process":
            ejection.process(which)
        case "node":
            ejection.node(which)
        case "hold":
            ejection.hold(which)
        case "release":
            ejection.release(which)
