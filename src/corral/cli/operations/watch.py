"""Requests operations on backends, shows their plans, and follows operations until they settle: progress bars on a
terminal, lines elsewhere, JSON for scripts.

Ctrl-C detaches from the operations; the fleet continues them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from corral.cli.common import declare
from corral.cli.common.options import note_unread_galleries
from corral.cli.common.output import (
    DONE,
    FAILED,
    STILL_RUNNING,
    console,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
    printable,
)
from corral.cli.operations import progress
from corral.cli.operations import text as operation_text
from corral.kit.errors import CorralError, NotFound

if TYPE_CHECKING:
    from rich.live import Live

    from corral.client import Client
    from corral.client.operation_watch import Watcher
    from corral.contract.admin import OperationBody, OperationView, PlanView

UP_TO_DATE = "Every backend is up to date."
UP_TO_DATE_IN_READABLE_GALLERIES = "Every backend is up to date with the galleries that can be read."


def absolute_uri(uri: str) -> str:
    """Make a relative path absolute: a node would read it relative to its own working folder."""
    return os.path.abspath(uri) if uri.startswith(("./", "../")) else uri


def node_scope(node: str, selector: str, all_nodes: bool, *, default: bool) -> dict[str, Any]:
    """The chosen nodes. `default`: whether no choice means every node."""
    if (bool(node) + bool(selector) + all_nodes) > 1:
        raise declare.BadParameter("give only one of --node, --selector and --all-nodes")
    if not (node or selector or all_nodes or default):
        raise declare.BadParameter("choose the nodes: --node NODE, --selector LABELS or --all-nodes")
    return {"node": node, "selector": selector}


def operation_body(kind: str, backend: str, scope: dict[str, Any], **more: Any) -> OperationBody:
    from corral.contract.admin import OperationBody

    return OperationBody(kind=kind, backend=backend, **scope, **more)


async def run_operations(
    client: Client,
    bodies: Sequence[OperationBody],
    *,
    dry_run: bool,
    detach: bool,
    as_json: bool,
    outdated: bool = False,
) -> int:
    """Request each operation, then follow all of them. A refused request does not stop the rest. `outdated`: the user
    did not name the backends, so a backend that no longer exists is skipped."""
    plans: list[PlanView] = []
    ids: list[str] = []
    unchanged: list[str] = []
    code = DONE
    for body in bodies:
        try:
            if dry_run:
                plans.append(await client.operations.plan(body))
                continue
            accepted = await client.operations.ask(body)
        except CorralError as error:
            if outdated and isinstance(error, NotFound):
                continue
            print_error(error.message)
            code = FAILED
            continue
        if accepted.joined:
            print_note(accepted.message)
        if accepted.unchanged:
            unchanged.append(accepted.message)
        if as_json or not accepted.unchanged:
            ids.append(accepted.job_id)
    if plans:
        _show_plans(plans, as_json=as_json)
    nothing_found = outdated and code == DONE and not (plans or ids or unchanged)
    if unchanged or nothing_found or any(_changes_nothing(plan) for plan in plans):
        await _print_unchanged(client, [] if as_json else unchanged, nothing_found=nothing_found)
    if nothing_found and as_json:
        print_json([])
    if not ids:
        return code
    result = await follow_or_detach(client, ids, detach=detach, as_json=as_json)
    return code or result


def _changes_nothing(plan: PlanView) -> bool:
    return plan.kind == "upgrade" and all(node.action == "nothing" for node in plan.nodes)


async def _print_unchanged(client: Client, sentences: Sequence[str], *, nothing_found: bool) -> None:
    """A gallery that cannot be read may have a newer version, so the message limits itself to the readable ones."""
    unread = await note_unread_galleries(client, "backends")
    for each in sentences:
        print_line(printable(f"{each} (in the galleries that can be read)" if unread else each))
    if nothing_found:
        print_note(UP_TO_DATE_IN_READABLE_GALLERIES if unread else UP_TO_DATE)


def _show_plans(plans: Sequence[PlanView], *, as_json: bool) -> None:
    if as_json:
        print_json(plans)
        return
    for plan in plans:
        rows = [operation_text.plan_row(node, plan.kind) for node in plan.nodes]
        print_table(operation_text.PLAN_COLUMNS, rows, empty="No node matches.")
        if plan.classes:
            print_line()
            print_table(
                operation_text.CLASS_COLUMNS, [operation_text.class_row(each) for each in plan.classes], empty=""
            )
        for each in plan.notes:
            print_note(printable(each))
        print_note(f"{operation_text.plan_title(plan)}. Nothing was changed.")


async def follow_or_detach(client: Client, ids: Sequence[str], *, detach: bool, as_json: bool) -> int:
    """Follow the operations that a command has started, or print how to follow them."""
    if not detach:
        return await follow(client, ids, as_json=as_json)
    if as_json:
        print_json([await client.operations.get(each) for each in ids])
    else:
        for each in ids:
            print_line(each)
        print_note(f"Detached; the {_noun(ids)}: `corral ops watch {_short_ids(ids)}`")
    return DONE


async def follow(client: Client, ids: Sequence[str], *, as_json: bool = False, until_ended: bool = False) -> int:
    """Follow until every operation has settled (`until_ended`: until every node has ended). Print the result and the
    next steps; return the exit code."""
    with ExitStack() as stack:
        watcher: Watcher = SilentWatcher() if as_json else _watcher(ids, stack)
        views = await _follow(client, ids, watcher, until_ended=until_ended)
    if views is None:
        return _detach(ids)
    if as_json:
        print_json(views)
    else:
        for view in views:
            for line in operation_text.result_lines(view):
                print_line(line)
        for line in operation_text.next_steps(views):
            print_note(line)
    return operation_text.exit_code(views)


async def wait_silently(client: Client, ids: Sequence[str]) -> int:
    """The same without output."""
    views = await _follow(client, ids, SilentWatcher(), until_ended=False)
    return _detach(ids) if views is None else operation_text.exit_code(views)


async def follow_as_json_lines(client: Client, ids: Sequence[str], *, until_ended: bool = False) -> int:
    """Print every change as a line of JSON."""
    views = await _follow(client, ids, JsonLineWatcher(), until_ended=until_ended)
    return _detach(ids) if views is None else operation_text.exit_code(views)


async def _follow(
    client: Client, ids: Sequence[str], watcher: Watcher, *, until_ended: bool
) -> list[OperationView] | None:
    """The last views, or None after Ctrl-C."""
    from corral.client.operation_watch import OperationWatch

    over = (lambda view: view.state == "done") if until_ended else (lambda view: view.settled)
    try:
        return await OperationWatch(client, ids, watcher, over=over).run()
    except asyncio.CancelledError:
        return None


def _detach(ids: Sequence[str]) -> int:
    print_note(f"Detached; the {_noun(ids)}: `corral ops watch {_short_ids(ids)}`")
    print_note(f"Stop it: `corral ops cancel {_short_ids(ids)}`")
    return STILL_RUNNING


def _noun(ids: Sequence[str]) -> str:
    return "operation continues" if len(ids) == 1 else "operations continue"


def _short_ids(ids: Sequence[str]) -> str:
    return " ".join(operation_text.short_id(each) for each in ids)


def _watcher(ids: Sequence[str], stack: ExitStack) -> Watcher:
    screen = console()
    if not sys.stdout.isatty() or screen.is_dumb_terminal:
        return LineWatcher(several=len(ids) > 1)
    from rich.live import Live

    return ScreenWatcher(stack.enter_context(Live(console=screen, auto_refresh=False)))


class SilentWatcher:
    def see(self, view: OperationView) -> None:
        pass

    def lost(self, reason: str) -> None:
        pass

    def found(self) -> None:
        pass


class JsonLineWatcher(SilentWatcher):
    def __init__(self) -> None:
        self._last: dict[str, OperationView] = {}

    def see(self, view: OperationView) -> None:
        if self._last.get(view.job_id) != view:
            self._last[view.job_id] = view
            print_json(view, indent=None)


class LineWatcher(SilentWatcher):
    def __init__(self, *, several: bool) -> None:
        self._lines = progress.ProgressLines(several=several)
        self._lost = False

    def see(self, view: OperationView) -> None:
        for line in self._lines.new(view):
            print_line(line)

    def lost(self, reason: str) -> None:
        if not self._lost:  # once; the next progress line shows that the connection is back
            self._lost = True
            print_error(f"lost the connection to the fleet ({reason}); retrying")

    def found(self) -> None:
        self._lost = False


class ScreenWatcher:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._views: dict[str, OperationView] = {}
        self._problem = ""

    def see(self, view: OperationView) -> None:
        self._views[view.job_id] = view
        self._draw()

    def lost(self, reason: str) -> None:
        self._problem = reason
        self._draw()

    def found(self) -> None:
        self._problem = ""

    def _draw(self) -> None:
        max_rows = max(1, min(progress.MAX_BARS, self._live.console.size.height - 3))
        shown = progress.screen(list(self._views.values()), max_rows=max_rows, problem=self._problem)
        self._live.update(shown, refresh=True)
