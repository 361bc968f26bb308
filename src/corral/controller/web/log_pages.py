"""`/fleet/logs`: the output of engines and backends, of one node or of every node that runs a model, and what the
worker of a node logs itself. The page says where to read; its script follows the log of each node through the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from litestar import get
from litestar.params import Parameter

from corral.controller.operations.backend_views import BackendViews
from corral.controller.replicas.listing import ReplicaListing
from corral.controller.web.navigation import LOGS
from corral.controller.web.page_context import Page, PageContext, Shown

_SOURCES = 24  # nodes that one page follows at once: a browser opens few connections to one server
Text = Annotated[str, Parameter(max_length=255)]


@dataclass(frozen=True)
class LogSource:
    node: str
    name: str  # empty: the worker's own log


@get(LOGS)
async def logs_page(
    context: PageContext,
    replica_rows: ReplicaListing,
    installed: BackendViews,
    name: Text = "",
    node: Text = "",
    find: Text = "",
    worker: bool = False,
) -> Page:
    async def fill() -> Shown:
        replicas, matrix = await replica_rows.list_(), await installed.matrix()
        placed = sorted({(row["node_name"], row["model_name"]) for row in replicas})
        models = sorted({model for _, model in placed})
        of_worker = worker and not name
        wanted = name.partition("#")[0]
        on = [node] if node else [at for at, model in placed if model == wanted]
        here = {at.id for at in matrix.nodes if at.name == node}
        backends = {row.backend for row in matrix.backends if here & row.nodes.keys()}
        choices = sorted({model for at, model in placed if at == node} | backends) if node else models
        return {
            "name": name,
            "node": node,
            "worker": of_worker,
            "subject": f"the worker of {node}" if of_worker else name,
            "find": find,
            "nodes": sorted({at for at, _ in placed} | {each.name for each in matrix.nodes}),
            "names": choices,
            "model": wanted if wanted in models else "",
            "sources": [LogSource(each, name) for each in on[:_SOURCES]] if name or of_worker else [],
        }

    return await context.page("logs.html", LOGS, "", fill)


PAGES = (logs_page,)
