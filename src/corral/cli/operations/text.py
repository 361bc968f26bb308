"""Operations as text: plans, rows, details, results, next steps; and their exit code. Pure; `commands.py` and
`watch.py` print it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from corral.cli.common.output import (
    DONE,
    FAILED,
    STILL_RUNNING,
    abbreviate,
    key_value_lines,
    printable,
    relative_time,
)
from corral.kit.humanize import format_bytes

if TYPE_CHECKING:
    from corral.contract.admin import OperationNodeView, OperationRecord, OperationView, PlanClass, PlanNode, PlanView

COLUMNS = ("ID", "KIND", "NAME", "WHERE", "STATE", "DONE", "NODES", "STARTED", "NOTE")
NODE_COLUMNS = ("NODE", "STATUS", "DONE", "VARIANT", "VERSION", "BYTES", "NOTE")
HISTORY_COLUMNS = ("ID", "KIND", "NAME", "OUTCOME", "STARTED", "FINISHED", "NOTE")
CLASS_COLUMNS = ("HARDWARE CLASS", "NODES", "FIRST", "FETCH", "GAP")
PLAN_COLUMNS = ("NODE", "ACTION", "VARIANT", "VERSION", "FETCH", "DISK AFTER", "PROCESSES", "NOTE")
NO_OPERATION = "No operation is running."
_SHORT_ID = 8
_MAX_SOURCES = 3
_DONE_WORDS = {
    "install": "installed",
    "upgrade": "upgraded",
    "delete": "deleted",
    "rollback": "rolled back",
    "fetch": "fetched",
    "stage": "staged",
    "corral-upgrade": "upgraded",
    "upload": "uploaded",
    "rollout": "rolled out",
}
UPLOAD = "upload"
STAGING = "staging"  # files of a model for its load: part of the load, and no operation
TRANSFERS = ("fetch", "stage", UPLOAD, STAGING)  # of files, to a place
_STATES = {"under_way": "running"}
_ENDED = ("success", "skipped", "superseded", "withdrawn", "cancelled")


def short_id(operation_id: str) -> str:
    """The beginning of an id, enough to tell operations apart; commands accept it."""
    return operation_id[:_SHORT_ID]


def where(view: OperationView) -> str:
    if view.scope == "controller":
        return "its requests" if view.kind == "rollout" else "the controller"
    return "every node" if view.scope == "all" else view.scope_value


def state(view: OperationView) -> str:
    if view.state == "done" and view.outcome in ("cancelled", "reverted"):
        return view.outcome
    return _STATES.get(view.state, view.state)


def exit_code(views: Iterable[OperationView]) -> int:
    """0 done, 1 a node fails or the operation was cancelled or reverted meanwhile, 3 not finished yet, also when an
    install waits for its first node (docs/explanation/design.md#operations). The worst one counts."""
    seen = list(views)
    states = {state(view) for view in seen}
    if states & {"failing", "cancelled", "reverted"}:
        return FAILED
    return STILL_RUNNING if states - {"done"} or any(_waits_for_nodes(view) for view in seen) else DONE


def _waits_for_nodes(view: OperationView) -> bool:
    """An install without a matching node waits for the first node that joins."""
    return view.kind == "install" and not view.nodes and view.scope in ("all", "selector")


def row(view: OperationView, now: datetime | None = None) -> tuple[str, ...]:
    ended = view.state == "done"
    return (
        "-" if view.kind == STAGING else short_id(view.job_id),
        view.kind,
        view.backend,
        where(view),
        state(view),
        "" if ended else f"{view.progress}%",
        tally(view.nodes) if view.nodes else tally_of(view.counts),
        relative_time(view.created_at, now),
        "" if ended else printable("; ".join(_by_reason("on", _failing(view), now)) or view.error or view.message),
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
    """The same for an operation that comes with counts instead of nodes."""
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
        "; ".join(part for part in (note(each, now), bad_sources(each)) if part),
    )


def percent(each: OperationNodeView) -> str:
    return "" if each.status in ("queued", "skipped") and not each.percentage else f"{each.percentage:.0f}%"


def amount(each: OperationNodeView) -> str:
    """`412.0 MiB / 1.0 GiB`, as far as known; only the total once all is there: what is built, unpacked or started then
    has its own percentage."""
    if each.status == "success" or each.current_bytes >= each.total_bytes > 0:
        return format_bytes(each.total_bytes) if each.total_bytes else ""
    if each.total_bytes:
        return f"{format_bytes(each.current_bytes)} / {format_bytes(each.total_bytes)}"
    return format_bytes(each.current_bytes) if each.current_bytes else ""


def rate(each: OperationNodeView) -> str:
    return f"{format_bytes(int(each.rate))}/s" if each.rate >= 1 else ""


def eta(each: OperationNodeView) -> str:
    """`2:05 left` at the present rate; empty when it is unknown."""
    if not each.eta_s:
        return ""
    minutes, seconds = divmod(round(each.eta_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


def sources(each: OperationNodeView) -> str:
    """`from attic 80%, controller 20%`: the sources of the bytes so far, the largest first."""
    total = sum(each.sources.values())
    if not total:
        return ""
    ranked = sorted(each.sources.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} {100 * size // total}%" for name, size in ranked[:_MAX_SOURCES]]
    return f"from {', '.join(shown)}" + (" and others" if len(ranked) > _MAX_SOURCES else "")


def bad_sources(each: OperationNodeView) -> str:
    """`wrong data from attic`: sources that sent wrong bytes. The note of a row that has ended names them itself."""
    if not each.bad_sources or "wrong data from" in (each.error + each.note):
        return ""
    return f"wrong data from {', '.join(each.bad_sources)}"


def moving_note(each: OperationNodeView, now: datetime | None = None) -> str:
    """The note, and while bytes arrive, the time that is left and their sources."""
    if not is_moving(each):
        return note(each, now)
    return ", ".join(part for part in (eta(each), sources(each), bad_sources(each), note(each, now)) if part)


def is_moving(each: OperationNodeView) -> bool:
    return each.status in ("downloading", "running_on_worker")


def step(each: OperationNodeView) -> str:
    """The current step: the phase while the node makes progress, else its status."""
    if each.status == "downloading":
        return each.phase or "started"
    return "running" if each.status == "running_on_worker" else each.status


def note(each: OperationNodeView, now: datetime | None = None) -> str:
    """The file while the node makes progress; else the reason for its status, and when the next attempt starts."""
    if each.status == "downloading":
        return each.file_name.rstrip("/").rpartition("/")[2] or each.error  # the last part of a URL; how far a soak is
    words = [each.error or each.note] if each.error or each.note else []
    if each.status == "error":
        words += [f"failed {each.failures} times"] if each.failures > 1 else []
        words.append(
            f"next attempt {relative_time(each.next_retry_at, now)}" if each.next_retry_at else _until_when(each.error)
        )
    return "; ".join(words)


def _until_when(error: str) -> str:
    from corral.contract.messages.backends import TO_FIX

    return "retried once that is done" if TO_FIX in error else "no automatic retry"


def line(each: OperationNodeView, now: datetime | None = None) -> str:
    """One node without a terminal: `attic: downloading 24% 412.0 MiB / 1.0 GiB 31.2 MiB/s (layer)`."""
    words = [step(each)]
    if is_moving(each):
        words += [percent(each), amount(each), rate(each), eta(each), sources(each)]
    words.append(bad_sources(each))
    if each.status == "success" and each.version:
        words.append(each.version)
    reason = note(each, now) if each.error != each.status else ""
    return printable(
        f"{each.node_name}: {' '.join(word for word in words if word)}" + (f" ({reason})" if reason else "")
    )


def details(view: OperationView, now: datetime | None = None) -> Iterator[str]:
    """Details of the operation as a whole, without its nodes."""
    yield from key_value_lines(
        [
            ("id", view.job_id),
            ("operation", f"{view.kind} {view.backend}"),
            ("where", where(view)),
            ("state", f"{state(view)}: {view.message}" if view.message not in ("", state(view)) else state(view)),
            ("done", f"{view.progress}%"),
            ("bytes", _bytes(view)),
            ("started", relative_time(view.created_at, now) + (f" by {view.created_by}" if view.created_by else "")),
            ("finished", relative_time(view.finished_at, now) if view.finished_at else ""),
            ("error", "" if _failing(view) else view.error),
            ("hidden", "yes" if view.dismissed else ""),
        ]
    )


def _bytes(view: OperationView) -> str:
    if not view.total_bytes or view.state == "done":
        return ""
    return f"{format_bytes(view.current_bytes)} / {format_bytes(view.total_bytes)}"


def history_row(record: OperationRecord, now: datetime | None = None) -> tuple[str, ...]:
    return (
        short_id(record.job_id),
        record.kind or record.task_type,
        record.name,
        record.outcome,
        relative_time(record.started_at, now),
        relative_time(record.finished_at, now),
        record.error,
    )


def result_lines(view: OperationView, now: datetime | None = None) -> list[str]:
    """The result when no node makes progress any more: one line for each group of nodes with the same result."""
    if not view.nodes:
        later = ""
        if _waits_for_nodes(view):
            which = "joins" if view.scope == "all" else f"joins with {view.scope_value}"
            later = f" yet; the first node that {which} gets it"
        return [printable(f"{view.backend}: no node matches{later}")]
    groups = [(f"{_DONE_WORDS.get(view.kind, 'done')} {'to' if view.kind in TRANSFERS else 'on'}", "success")]
    groups += [(f"{status} on", status) for status in ("skipped", "superseded", "withdrawn", "cancelled")]
    groups += [("failing on", "error"), ("waiting on", "waits"), ("running on", "")]
    reverted = [printable(f"{view.backend}: reverted: {view.error}")] if view.outcome == "reverted" else []
    return reverted + [
        printable(f"{view.backend}: {words}")
        for title, wanted in groups
        for words in _by_reason(title, [each for each in view.nodes if _group(each) == wanted], now)
    ]


def _group(each: OperationNodeView) -> str:
    if each.waits:
        return "waits"
    return each.status if each.status in (*_ENDED, "error") else ""


def next_steps(views: Sequence[OperationView]) -> list[str]:
    """The commands that help with operations that have not ended. The reason of an upload that stopped has its own:
    only its sender can continue it."""
    views = [view for view in views if view.kind != UPLOAD or view.state == "under_way"]
    lines = []
    if going := [view for view in views if any(_continues(each) for each in view.nodes)]:
        each = " ".join(short_id(view.job_id) for view in going)
        lines.append(
            f"The operation continues. Follow it: `corral ops watch {each}`; stop it: `corral ops cancel {each}`"
        )
    if reverted := [short_id(view.job_id) for view in views if view.outcome == "reverted"]:
        lines.append(f"See the figures: `corral rollouts show {reverted[0]}`; nodes go back now: `corral ops list`")
    if failing := [short_id(view.job_id) for view in views if _failing(view)]:
        lines.append(f"After fixing the cause, retry at once: `corral ops retry {' '.join(failing)}`")
    return lines


def _failing(view: OperationView) -> list[OperationNodeView]:
    return [each for each in view.nodes if each.status == "error"]


def _continues(each: OperationNodeView) -> bool:
    return bool(each.next_retry_at) if each.status == "error" else each.status not in _ENDED


def _by_reason(title: str, rows: Sequence[OperationNodeView], now: datetime | None) -> Iterator[str]:
    """One line for all nodes with the same reason; failing nodes show the earliest next attempt."""
    groups: dict[str, list[OperationNodeView]] = {}
    for each in rows:
        groups.setdefault("" if each.error == each.status else each.error or each.note, []).append(each)
    for reason, own in groups.items():
        if own[0].status == "error":
            reason = note(min(own, key=lambda each: each.next_retry_at or "~"), now)
        yield f"{title} {abbreviate([each.node_name for each in own])}" + (f": {reason}" if reason else "")


def plan_row(node: PlanNode, kind: str) -> tuple[str, ...]:
    nothing = node.action in ("nothing", "skip", "delete")
    return (
        node.node_name,
        plan_action(node, kind),
        node.variant,
        _change(node),
        "" if nothing else "?" if node.fetch_bytes is None else format_bytes(node.fetch_bytes),
        "" if nothing or node.disk_after_bytes is None else f"{format_bytes(node.disk_after_bytes)} free",
        node.processes,
        node.reason,
    )


def _change(node: PlanNode) -> str:
    """`1.0 → 1.1`; digests where there are no versions."""
    before = node.installed_version or short_digest(node.installed_digest)
    after = node.version or short_digest(node.digest)
    if node.action in ("nothing", "delete", "skip") or not before or before == after:
        return after if node.action not in ("delete", "skip") else before
    return f"{before} → {after}" if after else before


def class_row(each: PlanClass) -> tuple[str, ...]:
    """A hardware class in the plan of an upgrade."""
    gap = "unknown" if each.gap_s is None else f"{each.gap_s:.0f} s" if each.gap_s else "none"
    return (
        each.name,
        str(len(each.nodes)),
        each.nodes[0] if each.nodes else "",
        "?" if each.fetch_bytes is None else format_bytes(each.fetch_bytes),
        gap,
    )


def plan_title(plan: PlanView) -> str:
    counts = Counter(plan_action(node, plan.kind) for node in plan.nodes)
    words = ", ".join(f"{action} on {count}" for action, count in counts.items())
    return printable(f"Plan for {plan.kind} {plan.backend}: {words or 'nothing, no node matches'}")


def plan_action(node: PlanNode, kind: str) -> str:
    """The action of a node. A rollback is planned as an upgrade to the earlier version."""
    return "roll back" if kind == "rollback" and node.action == "upgrade" else node.action


def short_digest(digest: str) -> str:
    kind, _, digits = digest.partition(":")
    return f"{kind}:{digits[:12]}" if digits else digest[:12]
