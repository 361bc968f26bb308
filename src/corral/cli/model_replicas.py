"""`corral models load|unload|replicas|scale`: the replicas of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from corral.cli import model_text
from corral.cli.asking import Detach, Json, said
from corral.cli.load_progress import LoadProgress
from corral.cli.output import DONE, FAILED, complain, plain, print_json, print_table, tell
from corral.cli.remote import remote, remote_destructive
from corral.contract.loads import LoadState

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.catalogue import ScheduleBody, ScheduleView

Model = Annotated[str, typer.Argument(metavar="MODEL", help="its name", show_default=False)]
Node = Annotated[str, typer.Option("--node", metavar="NODE", help="on this node, by name or id", callback=said)]


@remote
async def load_model(client: Client, name: Model, detach: Detach = False, as_json: Json = False) -> int:
    """Have a replica of a model ready; out of a gallery when the fleet does not have the model yet.

    \b
    Examples:
      corral models load smollm2-135m
      corral models load smollm2-135m --detach
    """
    status = begun = await client.loads.ask(name)
    if not detach:
        with LoadProgress() as progress:
            async for status in client.loads.follow(begun):
                progress.see(status)
    if as_json:
        print_json(status)
    if status.state == LoadState.FAILED:
        complain(f"{name} could not be loaded: {status.error or 'nobody says why'}")
        return FAILED
    if not as_json:
        tell(f"{name}: ready" if status.state == LoadState.LOADED else f"{name}: is being loaded")
    return DONE


@remote_destructive
async def unload_model(
    client: Client,
    name: Model,
    node: Node = "",
    force: Annotated[bool, typer.Option("--force", help="whatever they are doing")] = False,
) -> None:
    """End the replicas of a model when they have done their work. The next request loads it again.

    \b
    Examples:
      corral models unload smollm2-135m
      corral models unload smollm2-135m --node attic
    """
    if node and force:
        raise typer.BadParameter("--force is for every node")
    tell(plain(f"{name}: {await client.loads.unload(name, node=node, force=force)}"))


@remote
async def list_replicas(
    client: Client,
    name: Annotated[str, typer.Argument(metavar="[MODEL]", help="only of this one", show_default=False)] = "",
    node: Node = "",
    as_json: Json = False,
) -> None:
    """List replicas: of a model or on a node in any state, else all that can answer.

    \b
    Examples:
      corral models replicas
      corral models replicas smollm2-135m
      corral models replicas --node attic
    """
    if name:
        await client.models.get(name)  # a word that was mistyped is told as such
    rows: list[dict[str, Any]] = await client.loads.replicas(name, node=node)
    if name and node:
        chosen = await client.nodes.get(node)
        rows = [row for row in rows if row.get("node_id") == chosen.id]
    if as_json:
        print_json(rows)
        return
    lines = [model_text.replica_row(row) for row in rows]
    print_table(model_text.REPLICA_COLUMNS, lines, empty="no replica")


@remote_destructive
async def scale_model(
    client: Client,
    name: Model,
    least: Annotated[int | None, typer.Option("--min", metavar="N", min=0, help="never fewer replicas")] = None,
    most: Annotated[int | None, typer.Option("--max", metavar="N", min=0, help="never more; 0: no bound")] = None,
    every_node: Annotated[bool, typer.Option("--all", help="one on every node that matches")] = False,
    auto: Annotated[bool, typer.Option("--auto", help="as many as requests need, anywhere: no schedule")] = False,
    selector: Annotated[
        str | None, typer.Option("--selector", "-l", metavar="LABELS", help="only on nodes with these: a=b,c=d")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="POLICY", help="round_robin or prefix_cache")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how many replicas of a model there should be, and where. What is not said stays as it is.

    \b
    Examples:
      corral models scale smollm2-135m --min 2
      corral models scale smollm2-135m --min 1 --max 4 --selector tier=fast
      corral models scale smollm2-135m --all
      corral models scale smollm2-135m --auto
    """
    given = (least, most, selector, policy)
    if auto and (every_node or any(each is not None for each in given)):
        raise typer.BadParameter("--auto goes with nothing else")
    if every_node and (least or most):
        raise typer.BadParameter("--all goes with neither --min nor --max")
    if auto:
        await client.models.delete_schedule(name)
        if as_json:
            print_json(None)
        else:
            tell(f"{name}: as many as requests need")
        return
    if not every_node and all(each is None for each in given):
        raise typer.BadParameter("say what: --min, --max, --all, --selector, --policy or --auto")
    before = (await client.models.get(name)).schedule
    body = schedule_of(name, before, least, most, every_node=every_node, selector=selector, policy=policy)
    written = await client.models.set_schedule(body)
    if as_json:
        print_json(written)
    else:
        tell(f"{name}: {model_text.wanted(written)}")


def schedule_of(
    name: str,
    before: ScheduleView | None,
    least: int | None,
    most: int | None,
    *,
    every_node: bool,
    selector: str | None,
    policy: str | None,
) -> ScheduleBody:
    """The new schedule over the old one; a number takes back `--all`."""
    import msgspec

    from corral.contract.catalogue import ScheduleBody
    from corral.contract.labels import parse_labels, parse_selector

    try:
        chosen = parse_labels(selector) if selector is not None else None
        if selector is not None and len(parse_selector(selector).terms) > len(chosen or {}):
            raise ValueError(f"{selector!r} names a label twice: no node has both values")
    except ValueError as error:
        raise typer.BadParameter(f"--selector: {error}") from error
    if chosen is None and before is not None and before.node_selector:
        chosen = msgspec.json.decode(before.node_selector, type=dict[str, str])
    spread = every_node or (before is not None and before.spread_all and least is None and most is None)
    kept_least, kept_most = (before.min_replicas, before.max_replicas) if before is not None else (0, 0)
    return ScheduleBody(
        model_name=name,
        node_selector=chosen,
        min_replicas=0 if spread else least if least is not None else kept_least,
        max_replicas=0 if spread else most if most is not None else kept_most,
        spread_all=spread,
        route_policy=policy,
    )


COMMANDS = {"load": load_model, "unload": unload_model, "replicas": list_replicas, "scale": scale_model}
