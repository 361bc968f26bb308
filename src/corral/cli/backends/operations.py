"""Requests operations on backends: chooses the nodes, shows plans, starts the operations and follows them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from corral.cli.backends import text as backend_text
from corral.cli.common.options import note_unread_galleries
from corral.cli.common.output import (
    DONE,
    FAILED,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
    printable,
)
from corral.cli.operations import watch
from corral.kit.errors import CorralError, NotFound

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.admin import OperationBody, PlanView

UP_TO_DATE = "Every backend is up to date."
UP_TO_DATE_IN_READABLE_GALLERIES = "Every backend is up to date with the galleries that can be read."


def absolute_uri(uri: str) -> str:
    """Make a relative path absolute: a node would read it relative to its own working folder."""
    return os.path.abspath(uri) if uri.startswith(("./", "../")) else uri


def node_scope(node: str, selector: str, all_nodes: bool, *, default: bool) -> dict[str, Any]:
    """The chosen nodes. `default`: whether no choice means every node."""
    if (bool(node) + bool(selector) + all_nodes) > 1:
        raise typer.BadParameter("give only one of --node, --selector and --all-nodes")
    if not (node or selector or all_nodes or default):
        raise typer.BadParameter("choose the nodes: --node NODE, --selector LABELS or --all-nodes")
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
    result = await watch.follow_or_detach(client, ids, detach=detach, as_json=as_json)
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
        rows = [backend_text.plan_row(node, plan.kind) for node in plan.nodes]
        print_table(backend_text.PLAN_COLUMNS, rows, empty="No node matches.")
        for each in plan.notes:
            print_note(printable(each))
        print_note(f"{backend_text.plan_title(plan)}. Nothing was changed.")
