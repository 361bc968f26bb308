"""`corral models load|unload|replicas|scale`: commands for the replicas of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import Detach, Json, reject_empty
from corral.cli.common.output import DONE, FAILED, print_error, print_json, print_line, print_table, printable
from corral.cli.models import text as model_text
from corral.cli.models.load_progress import LoadProgress
from corral.contract.loads import LoadState

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.catalogue import ScheduleBody, ScheduleView

Model = Annotated[str, declare.Argument(metavar="MODEL", help="name of the model")]
Node = Annotated[
    str, declare.Option("--node", metavar="NODE", help="only on this node, by name or id", callback=reject_empty)
]


@fleet_command
async def load_model(client: Client, name: Model, detach: Detach = False, as_json: Json = False) -> int:
    """Load a model, so that a replica is ready. A model that is not installed is installed from a gallery first.

    \b
    Examples:
      corral models load smollm2-135m
      corral models load smollm2-135m --detach
    """
    status = begun = await client.loads.ask(name)
    if not detach:
        with LoadProgress() as progress:
            async for status in client.loads.follow(begun):
                progress.show(status)
    if as_json:
        print_json(status)
    if status.state == LoadState.FAILED:
        print_error(f"cannot load {name}: {status.error or 'no reason was reported'} (see `corral why model {name}`)")
        return FAILED
    if not as_json:
        print_line(f"{name}: ready" if status.state == LoadState.LOADED else f"{name}: loading")
    return DONE


@destructive_command
async def unload_model(
    client: Client,
    name: Model,
    node: Node = "",
    force: Annotated[bool, declare.Option("--force", help="stop the replicas at once; requests on them fail")] = False,
) -> None:
    """Stop the replicas of a model after their running requests. The next request loads the model again.

    \b
    Examples:
      corral models unload smollm2-135m
      corral models unload smollm2-135m --node attic
    """
    if node and force:
        raise declare.BadParameter("--force cannot be combined with --node")
    print_line(printable(f"{name}: {await client.loads.unload(name, node=node, force=force)}"))


@fleet_command
async def list_replicas(
    client: Client,
    name: Annotated[str, declare.Argument(metavar="MODEL", help="only replicas of this model")] = "",
    node: Node = "",
    as_json: Json = False,
) -> None:
    """List replicas. With a model or a node: in any state; otherwise only replicas that are ready.

    \b
    Examples:
      corral models replicas
      corral models replicas smollm2-135m
      corral models replicas --node attic
    """
    await print_replicas(client, name, node, as_json=as_json)


async def print_replicas(client: Client, name: str = "", node: str = "", *, as_json: bool) -> None:
    if name:
        await client.models.get(name)  # reports a name that does not exist
    rows: list[dict[str, Any]] = await client.loads.replicas(name, node=node)
    if name and node:
        chosen = await client.nodes.get(node)
        rows = [row for row in rows if row.get("node_id") == chosen.id]
    if as_json:
        print_json(rows)
        return
    lines = [model_text.replica_row(row) for row in rows]
    print_table(model_text.REPLICA_COLUMNS, lines, empty=model_text.NO_REPLICAS)


@destructive_command
async def scale_model(
    client: Client,
    name: Model,
    min_replicas: Annotated[
        int | None, declare.Option("--min", metavar="N", min=0, help="minimum number of replicas")
    ] = None,
    max_replicas: Annotated[
        int | None, declare.Option("--max", metavar="N", min=0, help="maximum number of replicas; 0 for no maximum")
    ] = None,
    every_node: Annotated[bool, declare.Option("--all", help="one replica on every matching node")] = False,
    auto: Annotated[
        bool, declare.Option("--auto", help="remove the schedule: as many replicas as the requests need, on any node")
    ] = False,
    selector: Annotated[
        str | None,
        declare.Option("--selector", "-l", metavar="LABELS", help="only on nodes with these labels: a=b,c=d"),
    ] = None,
    policy: Annotated[
        str | None,
        declare.Option("--policy", metavar="POLICY", help="how requests choose a replica: round_robin or prefix_cache"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Set the number and the nodes of the replicas of a model. Options that are not given keep their value.

    \b
    Examples:
      corral models scale smollm2-135m --min 2
      corral models scale smollm2-135m --min 1 --max 4 --selector tier=fast
      corral models scale smollm2-135m --all
      corral models scale smollm2-135m --auto
    """
    given = (min_replicas, max_replicas, selector, policy)
    if auto and (every_node or any(each is not None for each in given)):
        raise declare.BadParameter("--auto cannot be combined with other options")
    if every_node and (min_replicas or max_replicas):
        raise declare.BadParameter("--all cannot be combined with --min or --max")
    if auto:
        await client.models.delete_schedule(name)
        if as_json:
            print_json(None)
        else:
            print_line(f"{name}: as many replicas as requests need")
        return
    if not every_node and all(each is None for each in given):
        raise declare.BadParameter("give at least one of --min, --max, --all, --selector, --policy and --auto")
    before = (await client.models.get(name)).schedule
    body = schedule_of(
        name, before, min_replicas, max_replicas, every_node=every_node, selector=selector, policy=policy
    )
    written = await client.models.set_schedule(body)
    if as_json:
        print_json(written)
    else:
        print_line(f"{name}: {model_text.wanted(written)}")


def schedule_of(
    name: str,
    before: ScheduleView | None,
    min_replicas: int | None,
    max_replicas: int | None,
    *,
    every_node: bool,
    selector: str | None,
    policy: str | None,
) -> ScheduleBody:
    """Combine the given options with the old schedule. A number of replicas ends `--all`."""
    import msgspec

    from corral.contract.catalogue import ScheduleBody
    from corral.contract.labels import parse_labels, parse_selector

    try:
        chosen = parse_labels(selector) if selector is not None else None
        if selector is not None and len(parse_selector(selector).terms) > len(chosen or {}):
            raise ValueError(f"{selector!r} requires two values of one label; no node has both")
    except ValueError as error:
        raise declare.BadParameter(f"--selector: {error}") from error
    if chosen is None and before is not None and before.node_selector:
        chosen = msgspec.json.decode(before.node_selector, type=dict[str, str])
    spread = every_node or (before is not None and before.spread_all and min_replicas is None and max_replicas is None)
    kept_min, kept_max = (before.min_replicas, before.max_replicas) if before is not None else (0, 0)
    return ScheduleBody(
        model_name=name,
        node_selector=chosen,
        min_replicas=0 if spread else min_replicas if min_replicas is not None else kept_min,
        max_replicas=0 if spread else max_replicas if max_replicas is not None else kept_max,
        spread_all=spread,
        route_policy=policy,
    )


COMMANDS = {"load": load_model, "unload": unload_model, "replicas": list_replicas, "scale": scale_model}
