"""`corral backends …`: lists, installs, upgrades, rolls back, verifies and deletes inference engines on the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from corral.cli.backends import text as backend_text
from corral.cli.backends.verify import verify_on_nodes
from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import (
    NO_MATCH,
    NO_MATCH_IN_READABLE_GALLERIES,
    Detach,
    DryRun,
    Json,
    MaxErrors,
    MaxSlowdown,
    MinRequests,
    Yes,
    confirm,
    note_unread_galleries,
    reject_empty,
    soak_fields,
    unknown_name,
)
from corral.cli.common.output import (
    FAILED,
    key_value_lines,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
)
from corral.cli.operations.watch import (
    UP_TO_DATE,
    UP_TO_DATE_IN_READABLE_GALLERIES,
    absolute_uri,
    node_scope,
    operation_body,
    run_operations,
)
from corral.kit.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from corral.client import Client
    from corral.client.resources.backends import AvailableBackend
    from corral.contract.admin import BackendMatrix

app = declare.App(
    help="""Install, upgrade, verify and delete backends.

    Backends are the inference engines on the nodes.

    \b
    Examples:
      corral backends available
      corral backends install llama-cpp
      corral backends upgrade --outdated --dry-run
    """,
)
Backend = Annotated[str, declare.Argument(metavar="NAME", help="name of the backend")]
Names = Annotated[list[str], declare.Argument(metavar="NAME", help="names of backends")]
MaybeNames = Annotated[list[str] | None, declare.Argument(metavar="NAME", help="names of backends")]
Node = Annotated[
    str, declare.Option("--node", metavar="NODE", help="only on this node, by name or id", callback=reject_empty)
]
Selector = Annotated[
    str,
    declare.Option(
        "--selector", "-l", metavar="LABELS", help="only on nodes with these labels: a=b,!c", callback=reject_empty
    ),
]
AllNodes = Annotated[bool, declare.Option("--all-nodes", help="on every node, including nodes that join later")]
MaxParallel = Annotated[
    str,
    declare.Option("--max-parallel", metavar="N", help="number or share of nodes that switch at the same time: 3, 25%"),
]


@app.command("available")
@fleet_command
async def list_available(
    client: Client,
    term: Annotated[
        str,
        declare.Argument(metavar="TERM", help="only entries with this text in name, description or tags"),
    ] = "",
    builds: Annotated[
        bool, declare.Option("--builds", help="include builds for one kind of hardware and development versions")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the backends that a node of the fleet can run.

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
        declare.Option(
            "--uri", metavar="URI", help="install from this URI instead of a gallery: oci://, https://, file://"
        ),
    ] = "",
    own_name: Annotated[str, declare.Option("--name", metavar="NAME", help="with --uri: name of the backend")] = "",
    alias: Annotated[
        str, declare.Option("--alias", metavar="NAME", help="with --uri: a second name of the backend")
    ] = "",
    force: Annotated[
        bool, declare.Option("--force", help="fetch and install again, even if the backend is installed")
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
        raise declare.BadParameter("give either names of backends or --uri")
    if (own_name or alias) and not uri:
        raise declare.BadParameter("--name and --alias need --uri")
    scope = node_scope(node, selector, all_nodes, default=True)
    extra = {"uri": absolute_uri(uri), "name": own_name, "alias": alias} if uri else {}
    bodies = [
        operation_body("install", each, scope, force=force, max_parallel=max_parallel, **extra)
        for each in names or [""]
    ]
    return await run_operations(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json)


@app.command("upgrade")
@destructive_command
async def upgrade_backends(
    client: Client,
    names: MaybeNames = None,
    outdated: Annotated[
        bool, declare.Option("--outdated", help="every backend that has a newer version in a gallery")
    ] = False,
    node: Node = "",
    selector: Selector = "",
    all_nodes: AllNodes = False,
    max_parallel: MaxParallel = "",
    soak: Annotated[
        str,
        declare.Option(
            "--soak",
            metavar="TIME|N",
            help="watch the first node of each hardware class for this time (5m), or for N of its requests (200)",
            callback=reject_empty,
        ),
    ] = "",
    max_errors: MaxErrors = "",
    max_slowdown: MaxSlowdown = None,
    min_requests: MinRequests = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Upgrade backends on the nodes that have them. All nodes fetch first; then they switch, a few at a time.

    One node of each hardware class switches first. With --soak its requests are compared with those of the old build;
    if failures, time to first token or tokens/s are worse, every node that has switched returns to its previous
    version. If a node fails to switch, no other node starts to switch; if it fails again, the upgrade is reverted.
    `corral rollouts` shows the figures, pauses, promotes and aborts. If every node has the newest version, the command
    says so and the exit code is 0.

    \b
    Examples:
      corral backends upgrade llama-cpp
      corral backends upgrade --outdated --dry-run
      corral backends upgrade vllm --selector tier=test --max-parallel 1
      corral backends upgrade vllm --soak 5m --max-errors 1%
    """
    if outdated == bool(names):
        raise declare.BadParameter("give either names of backends or --outdated")
    scope = node_scope(node, selector, all_nodes, default=True)
    chosen = list(names or []) or await _outdated(client, node)
    given = soak_fields(soak=soak, max_errors=max_errors, max_slowdown=max_slowdown, min_requests=min_requests)
    bodies = [operation_body("upgrade", each, scope, max_parallel=max_parallel, **given) for each in chosen]
    return await run_operations(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json, outdated=outdated)


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
    """Return to the previous version. Nodes keep that version, so nothing is fetched.

    \b
    Examples:
      corral backends rollback llama-cpp
      corral backends rollback llama-cpp --node attic
    """
    scope = node_scope(node, selector, all_nodes, default=True)
    bodies = [operation_body("rollback", each, scope, max_parallel=max_parallel) for each in names]
    return await run_operations(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json)


@app.command("delete")
@destructive_command
async def delete_backends(
    client: Client,
    names: Names,
    node: Node = "",
    selector: Selector = "",
    all_nodes: AllNodes = False,
    force: Annotated[bool, declare.Option("--force", help="delete even if a model uses the backend")] = False,
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
    scope = node_scope(node, selector, all_nodes, default=False)
    bodies = [operation_body("delete", each, scope, force=force) for each in names]
    if not yes and not dry_run:
        where = f"on {node}" if node else f"on nodes with {selector}" if selector else "on every node"
        confirm(f"delete {', '.join(names)} {where}")
    return await run_operations(client, bodies, dry_run=dry_run, detach=detach, as_json=as_json)


@app.command("upgrades")
@fleet_command
async def list_upgrades(
    client: Client,
    check: Annotated[
        bool, declare.Option("--check", help="read the galleries now instead of using the last result")
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
    """Check every file of installed backends.

    The digest of each file must be the one it had at installation.

    \b
    Examples:
      corral backends verify llama-cpp
      corral backends verify llama-cpp --node attic
    """
    found, code = await verify_on_nodes(client, names, node)
    if as_json:
        print_json(found)
    else:
        print_table(backend_text.VERIFY_COLUMNS, [backend_text.verified_row(each) for each in found], empty="")
    for each in found:
        if not each.whole:
            command = f"corral backends install {each.backend} --force --node {each.node}"
            print_error(f"{each.backend} is damaged on {each.node}; install it again: `{command}`")
            code = FAILED
    return code
