"""Operations in words: rows, details, what remains, the exit code. Pure; `ops.py` and `watching.py` print it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from corral.cli.output import DONE, FAILED, UNDER_WAY, ago, pairs, plain, size, some
from corral.contract.admin import OperationNodeView, OperationRecord, OperationView
from corral.contract.messages.backends import TO_FIX

COLUMNS = ("ID", "WHAT", "NAME", "WHERE", "STATE", "DONE", "NODES", "ASKED", "NOTE")
NODE_COLUMNS = ("NODE", "STATUS", "DONE", "VARIANT", "VERSION", "BYTES", "NOTE")
HISTORY_COLUMNS = ("ID", "WHAT", "NAME", "OUTCOME", "STARTED", "FINISHED", "NOTE")
_SHORT_ID = 8
_DONE_WORDS = {
    "install": "installed",
    "upgrade": "upgraded",
    "delete": "deleted",
    "rollback": "rolled back",
    "fetch": "fetched",
}
_STATES = {"under_way": "under way"}
_ENDED = ("success", "skipped", "superseded", "withdrawn", "cancelled")


def short_id(operation_id: str) -> str:
    """Enough of it to tell operations apart; commands take it for the whole."""
    return operation_id[:_SHORT_ID]


def where(view: OperationView) -> str:
    if view.scope == "controller":
        return "the controller"
    return "every node" if view.scope == "all" else view.scope_value


def state(view: OperationView) -> str:
    if view.state == "done" and view.outcome == "cancelled":
        return "cancelled"
    return _STATES.get(view.state, view.state)


def exit_code(views: Iterable[OperationView]) -> int:
    """0 done, 1 a node is failing, 3 only waiting (for a first node, too) or not settled yet
    (docs/explanation/design.md#operations). The worst of several counts. What was taken back while it was followed did
    not happen, so that is no success either."""
    seen = list(views)
    states = {state(view) for view in seen}
    if states & {"failing", "cancelled"}:
        return FAILED
    return UNDER_WAY if states - {"done"} or any(_waits_for_nodes(view) for view in seen) else DONE


def _waits_for_nodes(view: OperationView) -> bool:
    """An install that found no node has installed nothing: it waits for the first node that joins."""
    return view.kind == "install" and not view.nodes and view.scope in ("all", "selector")


def row(view: OperationView, now: datetime | None = None) -> tuple[str, ...]:
    ended = view.state == "done"
    return (
        short_id(view.job_id),
        view.kind,
        view.backend,
        where(view),
        state(view),
        "" if ended else f"{view.progress}%",
        tally(view.nodes) if view.nodes else tally_of(view.counts),
        ago(view.created_at, now),
        "" if ended else plain("; ".join(_by_reason("on", _failing(view), now)) or view.error or view.message),
    )


def tally(rows: Sequence[OperationNodeView]) -> str:
    """`2 of 3 done, 1 failing`."""
    if not rows:
        return "none"
    words = [f"{sum(each.status == 'success' for each in rows)} of {len(rows)} done"]
    for title, chosen in (
        ("failing", [each for each in rows if each.status == "error"]),
        ("waiting", [each for each in rows if each.waits]),
        ("skipped", [each for each in rows if each.status == "skipped"]),
    ):
        words += [f"{len(chosen)} {title}"] if chosen else []
    return ", ".join(words)


def tally_of(counts: Mapping[str, int]) -> str:
    """The same of an operation whose nodes were only counted."""
    if not counts:
        return "none"
    words = [f"{counts.get('success', 0)} of {sum(counts.values())} done"]
    for status, title in (("error", "failing"), ("queued", "queued"), ("skipped", "skipped")):
        words += [f"{counts[status]} {title}"] if counts.get(status) else []
    return ", ".join(words)


def node_row(each: OperationNodeView, now: datetime | None = None) -> tuple[str, ...]:
    return (
        each.node_name,
        each.status,
        percent(each),
        each.variant,
        each.version,
        amount(each),
        note(each, now),
    )


def percent(each: OperationNodeView) -> str:
    return "" if each.status in ("queued", "skipped") and not each.percentage else f"{each.percentage:.0f}%"


def amount(each: OperationNodeView) -> str:
    """`412.0 MiB / 1.0 GiB`, as far as it is known; what has ended well has come whole."""
    if each.status == "success":
        return size(each.total_bytes) if each.total_bytes else ""
    if each.total_bytes:
        return f"{size(each.current_bytes)} / {size(each.total_bytes)}"
    return size(each.current_bytes) if each.current_bytes else ""


def rate(each: OperationNodeView) -> str:
    return f"{size(int(each.rate))}/s" if each.rate >= 1 else ""


def is_moving(each: OperationNodeView) -> bool:
    return each.status in ("downloading", "running_on_worker")


def step(each: OperationNodeView) -> str:
    """The one word for where it is: its phase while it moves, else its status."""
    if each.status == "downloading":
        return each.phase or "started"
    return "running" if each.status == "running_on_worker" else each.status


def note(each: OperationNodeView, now: datetime | None = None) -> str:
    """Why it is as it is, and when it is tried again; while it moves, the file."""
    if each.status == "downloading":
        return each.file_name.rstrip("/").rpartition("/")[2]  # of a URL the end says most
    words = [each.error or each.note] if each.error or each.note else []
    if each.status == "error":
        words += [f"failed {each.failures} times"] if each.failures > 1 else []
        words.append(f"next try {ago(each.next_retry_at, now)}" if each.next_retry_at else _until_when(each.error))
    return "; ".join(words)


def _until_when(error: str) -> str:
    return "tried again once that is done" if TO_FIX in error else "not tried again by itself"


def line(each: OperationNodeView, now: datetime | None = None) -> str:
    """One node where there is no terminal: `attic: downloading 24% 412.0 MiB / 1.0 GiB 31.2 MiB/s (layer)`."""
    words = [step(each)]
    if is_moving(each):
        words += [percent(each), amount(each), rate(each)]
    if each.status == "success" and each.version:
        words.append(each.version)
    told = note(each, now) if each.error != each.status else ""
    return plain(f"{each.node_name}: {' '.join(word for word in words if word)}" + (f" ({told})" if told else ""))


def details(view: OperationView, now: datetime | None = None) -> Iterator[str]:
    """The operation as a whole; its nodes are a table of their own."""
    yield from pairs(
        [
            ("id", view.job_id),
            ("what", f"{view.kind} {view.backend}"),
            ("where", where(view)),
            ("state", f"{state(view)}: {view.message}" if view.message not in ("", state(view)) else state(view)),
            ("done", f"{view.progress}%"),
            ("bytes", _bytes(view)),
            ("asked", ago(view.created_at, now) + (f" by {view.created_by}" if view.created_by else "")),
            ("finished", ago(view.finished_at, now) if view.finished_at else ""),
            ("error", "" if _failing(view) else view.error),
            ("dismissed", "yes" if view.dismissed else ""),
        ]
    )


def _bytes(view: OperationView) -> str:
    if not view.total_bytes or view.state == "done":
        return ""
    return f"{size(view.current_bytes)} / {size(view.total_bytes)}"


def history_row(record: OperationRecord, now: datetime | None = None) -> tuple[str, ...]:
    return (
        short_id(record.job_id),
        record.kind or record.task_type,
        record.name,
        record.outcome,
        ago(record.started_at, now),
        ago(record.finished_at, now),
        record.error,
    )


def report(view: OperationView, now: datetime | None = None) -> list[str]:
    """What a watcher is told when nothing moves any more: what was done, what remains, how to follow it."""
    if not view.nodes:
        later = ""
        if _waits_for_nodes(view):
            which = "joins" if view.scope == "all" else f"joins with {view.scope_value}"
            later = f" yet; the first that {which} gets it"
        return [plain(f"{view.backend}: no node to do it on{later}")]
    groups = [(f"{_DONE_WORDS.get(view.kind, 'done')} {'to' if view.kind == 'fetch' else 'on'}", "success")]
    groups += [(f"{status} on", status) for status in ("skipped", "superseded", "withdrawn", "cancelled")]
    groups += [("failing on", "error"), ("waits on", "waits"), ("under way on", "")]
    return [
        plain(f"{view.backend}: {words}")
        for title, wanted in groups
        for words in _by_reason(title, [each for each in view.nodes if _group(each) == wanted], now)
    ]


def _group(each: OperationNodeView) -> str:
    if each.waits:
        return "waits"
    return each.status if each.status in (*_ENDED, "error") else ""


def how_to_go_on(views: Sequence[OperationView]) -> list[str]:
    """For what has not ended."""
    lines = []
    if going := [view for view in views if any(_goes_on(each) for each in view.nodes)]:
        each = " ".join(short_id(view.job_id) for view in going)
        lines.append(
            f"It goes on by itself: `corral ops watch {each}` follows it, `corral ops cancel {each}` stops it."
        )
    if failing := [short_id(view.job_id) for view in views if _failing(view)]:
        lines.append(f"Once the cause is mended, `corral ops retry {' '.join(failing)}` tries at once.")
    return lines


def _failing(view: OperationView) -> list[OperationNodeView]:
    return [each for each in view.nodes if each.status == "error"]


def _goes_on(each: OperationNodeView) -> bool:
    return bool(each.next_retry_at) if each.status == "error" else each.status not in _ENDED


def _by_reason(title: str, rows: Sequence[OperationNodeView], now: datetime | None) -> Iterator[str]:
    """A thousand nodes that wait for the same are one line; of those that fail alike the next to be tried speaks."""
    groups: dict[str, list[OperationNodeView]] = {}
    for each in rows:
        groups.setdefault("" if each.error == each.status else each.error or each.note, []).append(each)
    for reason, own in groups.items():
        if own[0].status == "error":
            reason = note(min(own, key=lambda each: each.next_retry_at or "~"), now)
        yield f"{title} {some([each.node_name for each in own])}" + (f": {reason}" if reason else "")
