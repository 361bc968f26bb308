"""`corral backends …`: lists, installs, upgrades, rolls back, verifies and deletes inference engines on the nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corral.cli.backends import text as backend_text
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import (
    NO_MATCH,
    NO_MATCH_IN_READABLE_GALLERIES,
    Detach,
    DryRun,
    Json,
    Yes,
    confirm,
    note_unread_galleries,
    reject_empty,
    unknown_name,
)
from corral.cli.common.output import (
    DONE,
    FAILED,
    key_value_lines,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
    printable,
)
from corral.cli.operations import watch
from corral.kit.errors import CorralError, NotFound, Unavailable

if TYPE_CHECKING:
    from corral.client import Client
    from corral.client.resources.backends import AvailableBackend
    from corral.contract.admin import BackendMatrix, BackendVerified, OperationBody, PlanView

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="""Install, upgrade, verify and delete backends: the inference engines on the nodes.

    \b
    Examples:
      corral backends available
      corral backends install llama-cpp
      corral backends upgrade --outdated --dry-run
    """,
)
Backend = Annotated[str, typer.Argument(metavar="NAME", help="name of the backend", show_default=False)]
Names = Annotated[list[str], typer.Argument(metavar="NAME", help="names of backends", show_default=False)]
MaybeNames = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="names of backends", show_default=False)]
Node = Annotated[
    str, typer.Option("--node", metavar="NODE", help="only on this node, by name or id", callback=reject_empty)
]
Selector = Annotated[
    str,
    typer.Option(
        "--selector", "-l", metavar="LABELS", help="only on nodes with these labels: a=b,!c", callback=reject_empty
    ),
]
AllNodes = Annotated[bool, typer.Option("--all-nodes", help="on every node, including nodes that join later")]
MaxParallel = Annotated[
    str,
    typer.Option("--max-parallel", metavar="N", help="number or share of nodes that switch at the same time: 3, 25%"),
]
UP_TO_DATE = "Every backend is up to date."
UP_TO_DATE_IN_READABLE_GALLERIES = "Every backend is up to date with the galleries that can be read."
MAX_PARALLEL_NODES = 16  # that read their disks at the same time because of one command


@app.command("available")
@fleet_command
async def list_available(
    client: Client,
    term: Annotated[
        str,
        typer.Argument(
            metavar="TERM", help="only entries with this text in name, description or tags", show_default=False
        ),
    ] = "",
    builds: Annotated[
        bool, typer.Option("--builds", help="include builds for one kind of hardware and development versions")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the backends in the galleries that a node of the fleet can run.

    \b
    Examples:
      corral backends available
      corral backends available whisper --builds
    """
    entries = backend_text.matching(await client.backends.available(), term, builds=builds)
    unread = await note_unread_galleries(client, "backends")
    if as_json:
        print_json(entries)
        return
    rows = [backend_text.available_row(entry) for entry in entries]
    print_table(backend_text.AVAILABLE_COLUMNS, rows, empty=NO_MATCH_IN_READABLE_GALLERIES if unread else NO_MATCH)


@app.command("list")
@fleet_command
async def list_backends(client: Client, node: Node = "", as_json: Json = False) -> None:
    """List the installed backends and their nodes.

    \b
    Examples:
      corral backends list
      corral backends list --node attic
    """
    matrix = await client.backends.matrix()
    if node:
        await _list_on_node(client, matrix, node, as_json=as_json)
        return
    if as_json:
        print_json([backend_text.as_data(row, matrix.nodes) for row in matrix.backends])
        return
    empty = (
        "No backend is installed. `corral backends available` lists names; install one: `corral backends install NAME`"
    )
    print_table(backend_text.COLUMNS, backend_text.matrix_rows(matrix), empty=empty)


async def _list_on_node(client: Client, matrix: BackendMatrix, node: str, *, as_json: bool) -> None:
    chosen = await client.nodes.get(node)
    rows = [(row, row.nodes[chosen.id]) for row in matrix.backends if chosen.id in row.nodes]
    if as_json:
        nodes = [each for each in matrix.nodes if each.id == chosen.id]
        print_json([backend_text.as_data(row, nodes) for row, _ in rows])
        return
    lines = [backend_text.node_row(row, cell) for row, cell in rows]
    print_table(backend_text.NODE_COLUMNS, lines, empty=f"No backend is installed on {chosen.name}.")


@app.command("show")
@fleet_command
async def show_backend(client: Client, name: Backend, as_json: Json = False) -> None:
    """Show one backend: its gallery entry and its state on each node.

    \b
    Examples:
      corral backends show llama-cpp
    """
    matrix = await client.backends.matrix()
    row = next((each for each in matrix.backends if each.backend == name), None)
    entries = await _entries(client, needed=row is None)
    entry = next((each for each in entries if name in (each.name, each.id)), None)
    if entry is None and row is None:
        known = [*(each.backend for each in matrix.backends), *(each.name for each in entries)]
        raise NotFound(unknown_name("backend", name, known, none="the galleries list no backends"))
    if as_json:
        installed = backend_text.as_data(row, matrix.nodes) if row is not None else None
        print_json({"backend": name, "available": entry, "installed": installed})
        return
    for line in key_value_lines(backend_text.entry_details(entry) if entry is not None else [("name", name)]):
        print_line(line)
    print_line()
    cells = [(node, row.nodes[node.id]) for node in matrix.nodes if node.id in row.nodes] if row is not None else []
    lines = [backend_text.show_row(node, cell) for node, cell in cells]
    print_table(
        backend_text.SHOW_COLUMNS, lines, empty=f"{name} is not installed. Install it: `corral backends install {name}`"
    )


async def _entries(client: Client, *, needed: bool) -> Sequence[AvailableBackend]:
    """The gallery entries. Unless they are needed, galleries that cannot be read are only a note."""
    try:
        return await client.backends.available()
    except Unavailable as error:
        if needed:
            raise
        print_note(f"The galleries cannot be read: {error.message}")
        return ()


@app.command("install")
@fleet_command
async def install_backends(
    client: Client,
    names: MaybeNames = None,
    node: Node = "",
    selector: Selector = "",
    all_nodes: AllNodes = False,
    uri: Annotated[
        str,
        typer.Option(
            "--uri", metavar="URI", help="install from this URI instead of a gallery: oci://, https://, file://"
        ),
    ] = "",
    own_name: Annotated[str, typer.Option("--name", metavar="NAME", help="with --uri: name of the backend")] = "",
    alias: Annotated[
        str, typer.Option("--alias", metavar="NAME", help="with --uri: a second name of the backend")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="fetch and install again, even if the backend is installed")
    ] = False,
    max_parallel: MaxParallel = "",
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Install backends. Without --node or --selector: on every node, including nodes that join later.

    Shows the progress of each node until no node makes progress. Ctrl-C detaches; the operation continues. Exit code 0:
    done on every node. 1: a node fails. 3: a node is not done yet, for example because it is offline; the backend is
    installed when the node is back.

    \b
    Examples:
      corral backends install llama-cpp
      corral backends install llama-cpp --node attic --dry-run
      corral backends install vllm --selector gpu=yes --detach
      corral backends install --uri file:///srv/backends/mine.tar.gz --name mine
    """
    if bool(uri) == bool(names):
        raise typer.BadParameter("give either names of backends or --uri")
    if (own_name or alias) and not uri:
        raise typer.BadParameter("--name and --alias need --uri")
    scope = _scope(node, selector, all_nodes, default=True)
    extra = {"uri": _absolute_uri(uri), "name": own_name, "alias": alias} if uri else {}
    bodies = [_body("install", each, scope, force=force, max_parallel=max_parallel, **extra) for each in names or [""]]
    return await _run_operations(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json)


@app.command("upgrade")
@destructive_command
async def upgrade_backends(
    client: Client,
    names: MaybeNames = None,
    outdated: Annotated[
        bool, typer.Option("--outdated", help="every backend that has a newer version in a gallery")
    ] = False,
    node: Node = "",
    selector: Selector = "",
    all_nodes: AllNodes = False,
    max_parallel: MaxParallel = "",
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Upgrade backends on the nodes that have them. All nodes fetch first; then they switch, a few at a time.

    If a node fails to switch, no other node starts to switch. `corral backends rollback` restores the version before.
    If every node has the newest version, the command says so and the exit code is 0.

    \b
    Examples:
      corral backends upgrade llama-cpp
      corral backends upgrade --outdated --dry-run
      corral backends upgrade vllm --selector tier=test --max-parallel 1
    """
    if outdated == bool(names):
        raise typer.BadParameter("give either names of backends or --outdated")
    scope = _scope(node, selector, all_nodes, default=True)
    chosen = list(names or []) or await _outdated(client, node)
    bodies = [_body("upgrade", each, scope, max_parallel=max_parallel) for each in chosen]
    return await _run_operations(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json, outdated=outdated)


async def _outdated(client: Client, node: str) -> list[str]:
    if not node:
        return sorted(await client.backends.upgrades())
    chosen = await client.nodes.get(node)
    matrix = await client.backends.matrix()
    return [row.backend for row in matrix.backends if (cell := row.nodes.get(chosen.id)) and cell.outdated]


@app.command("rollback")
@destructive_command
async def roll_back_backends(
    client: Client,
    names: Names,
    node: Node = "",
    selector: Selector = "",
    all_nodes: AllNodes = False,
    max_parallel: MaxParallel = "",
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Return to the version before the last upgrade. Nodes keep that version, so nothing is fetched.

    \b
    Examples:
      corral backends rollback llama-cpp
      corral backends rollback llama-cpp --node attic
    """
    scope = _scope(node, selector, all_nodes, default=True)
    bodies = [_body("rollback", each, scope, max_parallel=max_parallel) for each in names]
    return await _run_operations(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json)


@app.command("delete")
@destructive_command
async def delete_backends(
    client: Client,
    names: Names,
    node: Node = "",
    selector: Selector = "",
    all_nodes: AllNodes = False,
    force: Annotated[bool, typer.Option("--force", help="delete even if a model uses the backend")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Delete backends from nodes. Needs --node, --selector or --all-nodes. Running processes are stopped first.

    \b
    Examples:
      corral backends delete llama-cpp --node attic
      corral backends delete llama-cpp --all-nodes --yes
    """
    scope = _scope(node, selector, all_nodes, default=False)
    bodies = [_body("delete", each, scope, force=force) for each in names]
    if not yes and not dry_run:
        where = f"on {node}" if node else f"on nodes with {selector}" if selector else "on every node"
        confirm(f"delete {', '.join(names)} {where}")
    return await _run_operations(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json)


@app.command("upgrades")
@fleet_command
async def list_upgrades(
    client: Client,
    check: Annotated[
        bool, typer.Option("--check", help="read the galleries now instead of using the last result")
    ] = False,
    as_json: Json = False,
) -> None:
    """List backends that have a newer version in a gallery. Also lists the nodes whose version differs from the others.

    \b
    Examples:
      corral backends upgrades
      corral backends upgrades --check
    """
    upgrades = await (client.backends.check_upgrades() if check else client.backends.upgrades())
    unread = await note_unread_galleries(client, "backends")
    if as_json:
        print_json(upgrades)
        return
    rows = backend_text.upgrade_rows(upgrades)
    empty = UP_TO_DATE_IN_READABLE_GALLERIES if unread else UP_TO_DATE
    print_table(backend_text.UPGRADE_COLUMNS, rows, empty=empty)
    if rows:
        print_note("Upgrade all of them: `corral backends upgrade --outdated` (add `--dry-run` to see the plan first)")


@app.command("verify")
@fleet_command
async def verify_backends(client: Client, names: Names, node: Node = "", as_json: Json = False) -> int:
    """Check every file of installed backends against its digest at installation.

    \b
    Examples:
      corral backends verify llama-cpp
      corral backends verify llama-cpp --node attic
    """
    found, code = await _verify(client, names, node)
    if as_json:
        print_json(found)
    else:
        print_table(backend_text.VERIFY_COLUMNS, [backend_text.verified_row(each) for each in found], empty="")
    for each in found:
        if not each.whole:
            print_error(
                f"{each.node}: mend it with `corral backends install {each.backend} --force --node {each.node}`"
            )
            code = FAILED
    return code


async def _verify(client: Client, names: Sequence[str], node: str) -> tuple[list[BackendVerified], int]:
    """Verify on all nodes in parallel. A node that does not answer does not stop the rest."""
    matrix = await client.backends.matrix()
    node_names = {each.id: each.name for each in matrix.nodes}
    chosen = (await client.nodes.get(node)).id if node else ""
    there = {row.backend: [id for id, cell in row.nodes.items() if cell.installed] for row in matrix.backends}
    targets: list[tuple[str, str]] = []
    for name in names:
        where = [id for id in there.get(name, ()) if not chosen or id == chosen]
        if not where:
            raise NotFound(unknown_name("backend", name, sorted(there), none="no backend is installed"))
        targets += [(id, name) for id in where]
    limit = asyncio.Semaphore(MAX_PARALLEL_NODES)

    async def ask(node_id: str, backend: str) -> BackendVerified | None:
        async with limit:
            try:
                return await client.backends.verify(node_id, backend)
            except CorralError as error:
                print_error(f"{node_names.get(node_id, node_id)}: {error.message}")
                return None

    answers = await asyncio.gather(*(ask(*each) for each in targets))
    return [each for each in answers if each is not None], DONE if all(answers) else FAILED


def _absolute_uri(uri: str) -> str:
    """Make a relative path absolute: a node would read it relative to its own working folder."""
    return os.path.abspath(uri) if uri.startswith(("./", "../")) else uri


def _scope(node: str, selector: str, all_nodes: bool, *, default: bool) -> dict[str, Any]:
    """The chosen nodes. `default`: whether no choice means every node."""
    if (bool(node) + bool(selector) + all_nodes) > 1:
        raise typer.BadParameter("give only one of --node, --selector and --all-nodes")
    if not (node or selector or all_nodes or default):
        raise typer.BadParameter("choose the nodes: --node NODE, --selector LABELS or --all-nodes")
    return {"node": node, "selector": selector}


def _body(kind: str, backend: str, scope: dict[str, Any], **more: Any) -> OperationBody:
    from corral.contract.admin import OperationBody

    return OperationBody(kind=kind, backend=backend, **scope, **more)


async def _run_operations(
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
