"""`corral backends …`: inference engines, installed, upgraded, rolled back and deleted on every node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corral.cli import backend_text, watching
from corral.cli.asking import (
    NOTHING_FITS,
    NOTHING_FITS_IN_THE_REST,
    Detach,
    Json,
    Yes,
    confirm,
    remark_unread_galleries,
    said,
    unknown,
)
from corral.cli.output import DONE, FAILED, complain, pairs, plain, print_json, print_table, remark, tell
from corral.cli.remote import remote, remote_destructive
from corral.kit.errors import CorralError, NotFound, Unavailable

if TYPE_CHECKING:
    from corral.client import Client
    from corral.client.resources.backends import AvailableBackend
    from corral.contract.admin import BackendMatrix, BackendVerified, OperationBody, PlanView

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Backends: the inference engines on the nodes.",
)
Backend = Annotated[str, typer.Argument(metavar="NAME", help="of the backend", show_default=False)]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="of backends", show_default=False)]
MaybeNames = Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="of backends", show_default=False)]
Node = Annotated[str, typer.Option("--node", metavar="NODE", help="on this node, by name or id", callback=said)]
Selector = Annotated[
    str, typer.Option("--selector", "-l", metavar="LABELS", help="on nodes with these labels: a=b,!c", callback=said)
]
AllNodes = Annotated[bool, typer.Option("--all-nodes", help="on every node, also those that join later")]
MaxParallel = Annotated[str, typer.Option("--max-parallel", metavar="N", help="so many nodes switch at once: 3, 25%")]
NOTHING_NEWER = "everything is as new as the galleries have it"
NOTHING_NEWER_IN_THE_REST = "nothing newer in the galleries that can be read"
_AT_ONCE = 16  # nodes that read their disks because of one command
DryRun = Annotated[bool, typer.Option("--dry-run", help="only tell what would happen on each node")]


@app.command("available")
@remote
async def list_available(
    client: Client,
    term: Annotated[
        str, typer.Argument(metavar="[TERM]", help="only with this in name, description or tags", show_default=False)
    ] = "",
    builds: Annotated[bool, typer.Option("--builds", help="also single builds, and development")] = False,
    as_json: Json = False,
) -> None:
    """List what the galleries have that a node of the fleet can use.

    \b
    Examples:
      corral backends available
      corral backends available whisper --builds
    """
    entries = backend_text.matching(await client.backends.available(), term, builds=builds)
    unread = await remark_unread_galleries(client, "backends")
    if as_json:
        print_json(entries)
        return
    rows = [backend_text.available_row(entry) for entry in entries]
    print_table(backend_text.AVAILABLE_COLUMNS, rows, empty=NOTHING_FITS_IN_THE_REST if unread else NOTHING_FITS)


@app.command("list")
@remote
async def list_backends(client: Client, node: Node = "", as_json: Json = False) -> None:
    """List what is installed, and where.

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
    empty = "nothing is installed: `corral backends install NAME`, `corral backends available` for names"
    print_table(backend_text.COLUMNS, backend_text.matrix_rows(matrix), empty=empty)


async def _list_on_node(client: Client, matrix: BackendMatrix, node: str, *, as_json: bool) -> None:
    chosen = await client.nodes.get(node)
    rows = [(row, row.nodes[chosen.id]) for row in matrix.backends if chosen.id in row.nodes]
    if as_json:
        nodes = [each for each in matrix.nodes if each.id == chosen.id]
        print_json([backend_text.as_data(row, nodes) for row, _ in rows])
        return
    lines = [backend_text.node_row(row, cell) for row, cell in rows]
    print_table(backend_text.NODE_COLUMNS, lines, empty=f"nothing is installed on {chosen.name}")


@app.command("show")
@remote
async def show_backend(client: Client, name: Backend, as_json: Json = False) -> None:
    """Show one backend: what the galleries say of it, and how it stands on each node.

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
        raise NotFound(unknown("backend", name, known, none="no gallery has any"))
    if as_json:
        standing = backend_text.as_data(row, matrix.nodes) if row is not None else None
        print_json({"backend": name, "available": entry, "installed": standing})
        return
    for line in pairs(backend_text.entry_details(entry) if entry is not None else [("name", name)]):
        tell(line)
    tell()
    cells = [(node, row.nodes[node.id]) for node in matrix.nodes if node.id in row.nodes] if row is not None else []
    lines = [backend_text.show_row(node, cell) for node, cell in cells]
    print_table(backend_text.SHOW_COLUMNS, lines, empty=f"not installed: `corral backends install {name}`")


async def _entries(client: Client, *, needed: bool) -> Sequence[AvailableBackend]:
    """What is installed can be shown without the galleries too."""
    try:
        return await client.backends.available()
    except Unavailable as error:
        if needed:
            raise
        remark(f"the galleries cannot be read: {error.message}")
        return ()


@app.command("install")
@remote
async def install_backends(
    client: Client,
    names: MaybeNames = None,
    node: Node = "",
    selector: Selector = "",
    all_nodes: AllNodes = False,
    uri: Annotated[str, typer.Option("--uri", metavar="URI", help="from here: oci://, https://, file://")] = "",
    own_name: Annotated[str, typer.Option("--name", metavar="NAME", help="with --uri: what to call it")] = "",
    alias: Annotated[str, typer.Option("--alias", metavar="NAME", help="with --uri: another name for it")] = "",
    force: Annotated[bool, typer.Option("--force", help="fetch and install again what is there")] = False,
    max_parallel: MaxParallel = "",
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Install backends, on every node unless told otherwise; nodes that join later get them too.

    Stays and shows each node until nothing moves; Ctrl-C lets go, the fleet goes on. Exit code 0: done. 1: a node is
    failing. 3: only waiting, for a node that is away, say; it gets it when it is back.

    \b
    Examples:
      corral backends install llama-cpp
      corral backends install llama-cpp --node attic --dry-run
      corral backends install vllm --selector gpu=yes --detach
      corral backends install --uri file:///srv/backends/mine.tar.gz --name mine
    """
    if bool(uri) == bool(names):
        raise typer.BadParameter("give names of backends, or --uri")
    if (own_name or alias) and not uri:
        raise typer.BadParameter("--name and --alias go with --uri")
    scope = _scope(node, selector, all_nodes, default=True)
    extra = {"uri": _from_anywhere(uri), "name": own_name, "alias": alias} if uri else {}
    bodies = [_body("install", each, scope, force=force, max_parallel=max_parallel, **extra) for each in names or [""]]
    return await _carry_out(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json)


@app.command("upgrade")
@remote_destructive
async def upgrade_backends(
    client: Client,
    names: MaybeNames = None,
    outdated: Annotated[bool, typer.Option("--outdated", help="everything that has something newer")] = False,
    node: Node = "",
    selector: Selector = "",
    all_nodes: AllNodes = False,
    max_parallel: MaxParallel = "",
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Upgrade backends where they are installed. Everything is fetched first; then nodes switch, a few at a time.

    The first node that fails to switch stops the rest. `corral backends rollback` goes back. Where every node has the
    newest build already, a line says so and the exit code is 0.

    \b
    Examples:
      corral backends upgrade llama-cpp
      corral backends upgrade --outdated --dry-run
      corral backends upgrade vllm --selector tier=test --max-parallel 1
    """
    if outdated == bool(names):
        raise typer.BadParameter("give names of backends, or --outdated")
    scope = _scope(node, selector, all_nodes, default=True)
    chosen = list(names or []) or await _outdated(client, node)
    bodies = [_body("upgrade", each, scope, max_parallel=max_parallel) for each in chosen]
    return await _carry_out(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json, outdated=outdated)


async def _outdated(client: Client, node: str) -> list[str]:
    if not node:
        return sorted(await client.backends.upgrades())
    chosen = await client.nodes.get(node)
    matrix = await client.backends.matrix()
    return [row.backend for row in matrix.backends if (cell := row.nodes.get(chosen.id)) and cell.outdated]


@app.command("rollback")
@remote_destructive
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
    """Go back to the version before. Nodes keep it, so nothing need be fetched.

    \b
    Examples:
      corral backends rollback llama-cpp
      corral backends rollback llama-cpp --node attic
    """
    scope = _scope(node, selector, all_nodes, default=True)
    bodies = [_body("rollback", each, scope, max_parallel=max_parallel) for each in names]
    return await _carry_out(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json)


@app.command("delete")
@remote_destructive
async def delete_backends(
    client: Client,
    names: Names,
    node: Node = "",
    selector: Selector = "",
    all_nodes: AllNodes = False,
    force: Annotated[bool, typer.Option("--force", help="though a model uses it")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Delete backends. Where from has to be said; processes that run are stopped first.

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
    return await _carry_out(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json)


@app.command("upgrades")
@remote
async def list_upgrades(
    client: Client,
    check: Annotated[bool, typer.Option("--check", help="ask the galleries now")] = False,
    as_json: Json = False,
) -> None:
    """List what has something newer in the galleries, and nodes that differ from the others.

    \b
    Examples:
      corral backends upgrades
      corral backends upgrades --check
    """
    upgrades = await (client.backends.check_upgrades() if check else client.backends.upgrades())
    unread = await remark_unread_galleries(client, "backends")
    if as_json:
        print_json(upgrades)
        return
    rows = backend_text.upgrade_rows(upgrades)
    empty = NOTHING_NEWER_IN_THE_REST if unread else NOTHING_NEWER
    print_table(backend_text.UPGRADE_COLUMNS, rows, empty=empty)
    if rows:
        remark("`corral backends upgrade --outdated` upgrades them all, `--dry-run` tells what that means.")


@app.command("verify")
@remote
async def verify_backends(client: Client, names: Names, node: Node = "", as_json: Json = False) -> int:
    """Read every file of installed backends again: are they still as they were unpacked?

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
            complain(f"{each.node}: mend it with `corral backends install {each.backend} --force --node {each.node}`")
            code = FAILED
    return code


async def _verify(client: Client, names: Sequence[str], node: str) -> tuple[list[BackendVerified], int]:
    """All nodes that have it at once, each on its own disk; one that cannot answer does not stop the rest."""
    matrix = await client.backends.matrix()
    node_names = {each.id: each.name for each in matrix.nodes}
    chosen = (await client.nodes.get(node)).id if node else ""
    there = {row.backend: [id for id, cell in row.nodes.items() if cell.installed] for row in matrix.backends}
    asked: list[tuple[str, str]] = []
    for name in names:
        where = [id for id in there.get(name, ()) if not chosen or id == chosen]
        if not where:
            raise NotFound(unknown("backend", name, sorted(there), none="none is installed"))
        asked += [(id, name) for id in where]
    turns = asyncio.Semaphore(_AT_ONCE)

    async def ask(node_id: str, backend: str) -> BackendVerified | None:
        async with turns:
            try:
                return await client.backends.verify(node_id, backend)
            except CorralError as error:
                complain(f"{node_names.get(node_id, node_id)}: {error.message}")
                return None

    answers = await asyncio.gather(*(ask(*each) for each in asked))
    return [each for each in answers if each is not None], DONE if all(answers) else FAILED


def _from_anywhere(uri: str) -> str:
    """A node would read a path that begins here from where it stands itself."""
    return os.path.abspath(uri) if uri.startswith(("./", "../")) else uri


def _scope(node: str, selector: str, all_nodes: bool, *, default: bool) -> dict[str, Any]:
    """`default`: whether every node may be meant without a word."""
    if (bool(node) + bool(selector) + all_nodes) > 1:
        raise typer.BadParameter("give one of --node, --selector and --all-nodes")
    if not (node or selector or all_nodes or default):
        raise typer.BadParameter("say where: --node NODE, --selector LABELS or --all-nodes")
    return {"node": node, "selector": selector}


def _body(kind: str, backend: str, scope: dict[str, Any], **more: Any) -> OperationBody:
    from corral.contract.admin import OperationBody

    return OperationBody(kind=kind, backend=backend, **scope, **more)


async def _carry_out(
    client: Client,
    bodies: Sequence[OperationBody],
    *,
    dry_run: bool,
    detach: bool,
    as_json: bool,
    outdated: bool = False,
) -> int:
    """Ask for each, then watch all of them; one that is refused does not stop the rest. `outdated`: the backends were
    found, not named, so one that is not there is left out."""
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
            complain(error.message)
            code = FAILED
            continue
        if accepted.joined:
            remark(accepted.message)
        if accepted.unchanged:
            unchanged.append(accepted.message)
        if as_json or not accepted.unchanged:
            ids.append(accepted.job_id)
    if plans:
        _show_plans(plans, as_json=as_json)
    nothing_found = outdated and code == DONE and not (plans or ids or unchanged)
    if unchanged or nothing_found or any(_changes_nothing(plan) for plan in plans):
        await _say_unchanged(client, [] if as_json else unchanged, nothing_found=nothing_found)
    if nothing_found and as_json:
        print_json([])
    if not ids:
        return code
    how_it_ended = await watching.stay(client, ids, detach=detach, as_json=as_json)
    return code or how_it_ended


def _changes_nothing(plan: PlanView) -> bool:
    return plan.kind == "upgrade" and all(node.action == "nothing" for node in plan.nodes)


async def _say_unchanged(client: Client, sentences: Sequence[str], *, nothing_found: bool) -> None:
    """A gallery that cannot be read may have something newer, so it is named beside "nothing newer"."""
    unread = await remark_unread_galleries(client, "backends")
    for each in sentences:
        tell(plain(f"{each}, as far as the galleries can be read" if unread else each))
    if nothing_found:
        remark(NOTHING_NEWER_IN_THE_REST if unread else NOTHING_NEWER)


def _show_plans(plans: Sequence[PlanView], *, as_json: bool) -> None:
    if as_json:
        print_json(plans)
        return
    for plan in plans:
        rows = [backend_text.plan_row(node, plan.kind) for node in plan.nodes]
        print_table(backend_text.PLAN_COLUMNS, rows, empty="no node to do it on")
        for each in plan.notes:
            remark(plain(each))
        remark(f"{backend_text.plan_title(plan)}. Nothing was done.")
