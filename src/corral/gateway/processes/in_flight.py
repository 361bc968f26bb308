"""`routing/in_flight.py` for several processes: the requests in flight at a replica, counted over all of them.

Each process counts its own requests in its column of the replica's row. The parent's column also contains those of
other gateways, as the node reports them. A process reads the others' requests when it takes a slot, which decides
whether it may keep the slot, and when it refreshes; in between, its ranks are a few milliseconds old.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping

from corral.gateway.processes.table import PARENT, SharedTable
from corral.gateway.routing.in_flight import Ejection, InFlight, SlotCounter
from corral.gateway.routing.pick import BUSY

_PEAK = 1 << 20  # a peak cell is the number of the node's report, times this, plus the peak since that report


def row_name(process_id: str) -> str:
    return f"replica {process_id}"


class SharedSlotCounter(SlotCounter):
    """The second number of a row is the maximum of a process's requests in flight since the node's last report
    (`_PEAK`); in the parent's column, the number of that report."""

    __slots__ = (
        "_cells",
        "_children",
        "_epoch",
        "_last_own",
        "_other_gateways",
        "_others_at",
        "_own_at",
        "_peak_at",
        "_report_at",
    )

    def __init__(self, node_id: str, columns: int) -> None:
        super().__init__(node_id)
        self._other_gateways = 0  # requests of other gateways; only the parent gets the reports
        self._epoch = 0.0
        self._last_own = [0] * columns  # of each process, at the last report
        # A private row until it is bound: where the table is full, a process counts its own requests only.
        self._cells = memoryview(array("d", [0.0] * 2 * columns)).cast("B").cast("d")
        self._set_cells(0, columns, PARENT)

    def _set_cells(self, first: int, columns: int, column: int) -> None:
        self._own_at = first + column
        self._others_at = tuple(first + each for each in range(columns) if each != column)
        self._children = range(first + 1, first + columns)
        self._report_at = first + columns
        self._peak_at = first + columns + column

    def bind_row(self, table: SharedTable, row: int) -> None:
        if self._cells is table.cells and self._own_at == table.first(row) + table.column:
            return
        self._cells = table.cells
        self._set_cells(table.first(row), table.columns, table.column)
        self._epoch = self._cells[self._report_at]
        self._cells[self._own_at] = self.own + self._other_gateways

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        """Another process took the last slot at the same time: this process has to return its slot."""
        return self.own + self._others > self._slots

    def begin(self) -> None:
        cells = self._cells
        own = self.own = self.own + 1
        cells[self._own_at] = own + self._other_gateways
        report = cells[self._report_at]
        if own > self._peak or report != self._epoch:
            self._peak, self._epoch = own, report
            if self._peak_at != self._report_at:
                cells[self._peak_at] = report * _PEAK + own
        others: float = self._other_gateways  # as in `refresh`, without the call: this is the fast path
        for at in self._others_at:
            others += cells[at]
        total = own + int(others)
        self._others = total - own
        self._ranks[self._index] = self._base + (total if total < self._slots else total + BUSY)

    def end(self) -> None:
        own = self.own = self.own - 1
        self._cells[self._own_at] = own + self._other_gateways
        total = own + self._others
        self._ranks[self._index] = self._base + (total if total < self._slots else total + BUSY)
        if self._queue.waiting:
            self._queue.on_slot_free()

    def refresh(self) -> None:
        """Read the requests in flight of the other processes."""
        cells = self._cells
        others: float = self._other_gateways
        for at in self._others_at:
            others += cells[at]
        self._others = int(others)
        total = self.own + self._others
        self._ranks[self._index] = self._base + (total if total < self._slots else total + BUSY)

    def on_report(self, in_flight: int) -> None:
        """In the parent: the node's count, which includes all our processes (peaks: `SlotCounter.on_report`)."""
        cells, report = self._cells, self._cells[self._report_at]
        ours = self.own
        for number, at in enumerate(self._children, 1):
            epoch, peak = divmod(cells[at + len(self._last_own)], _PEAK)
            now = int(cells[at])
            ours += max(now, int(peak) if epoch == report else self._last_own[number])
            self._last_own[number] = now
        self._other_gateways = max(0, in_flight - ours)
        cells[self._report_at] = report + 1
        cells[self._own_at] = self.own + self._other_gateways
        self.refresh()
        if self._queue.waiting:
            self._queue.on_slot_free()


class SharedInFlight(InFlight):
    def __init__(self, table: SharedTable) -> None:
        super().__init__()
        self._table = table
        self._rows: Mapping[str, int] = {}

    def use(self, rows: Mapping[str, int]) -> None:
        """The rows of the view that is applied next."""
        self._rows = rows

    def counter(self, process_id: str, node_id: str) -> SlotCounter:
        counter = super().counter(process_id, node_id)
        row = self._rows.get(row_name(process_id))
        if row is not None and isinstance(counter, SharedSlotCounter):
            counter.bind_row(self._table, row)
        return counter

    def new_counter(self, node_id: str) -> SlotCounter:
        return SharedSlotCounter(node_id, self._table.columns)


class SharedEjection(Ejection):
    """In a child: all processes eject a replica or node that this process could not reach, also the parent, which
    serves the waiting requests."""

    on_change: Callable[[str, str], None]  # action, and id of the process or node; set before the first request
    _is_remote = False

    def eject_process(self, process_id: str) -> None:
        before = self.count
        super().eject_process(process_id)
        if self.count != before:
            self._publish("process", process_id)

    def eject_node(self, node_id: str) -> None:
        before = self.count
        super().eject_node(node_id)
        if self.count != before:
            self._publish("node", node_id)

    def suspend_node(self, node_id: str) -> None:
        super().suspend_node(node_id)
        self._publish("suspend", node_id)

    def resume_node(self, node_id: str) -> None:
        super().resume_node(node_id)
        self._publish("resume", node_id)

    def _publish(self, action: str, target_id: str) -> None:
        if not self._is_remote:
            self.on_change(action, target_id)

    def apply_remote(self, action: str, target_id: str) -> None:
        """Apply the change of another process, which has counted it."""
        count, self._is_remote = self.count, True
        try:
            apply_ejection(self, action, target_id)
        finally:
            self.count, self._is_remote = count, False


def apply_ejection(ejection: Ejection, action: str, target_id: str) -> None:
    match action:
        case "process":
            ejection.eject_process(target_id)
        case "node":
            ejection.eject_node(target_id)
        case "suspend":
            ejection.suspend_node(target_id)
        case "resume":
            ejection.resume_node(target_id)
