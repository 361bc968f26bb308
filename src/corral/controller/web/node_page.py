"""`/nodes/NAME`: one node, and the part of it that its script fetches."""

from __future__ import annotations

from typing import Annotated

from litestar import get
from litestar.di import Provide
from litestar.params import Parameter

from corral.controller.api.auth import viewers
from corral.controller.operations.backend_views import BackendViews
from corral.controller.operations.service import Operations
from corral.controller.registry.nodes import NodeAdmin
from corral.controller.replicas.listing import ReplicaListing
from corral.controller.samples.service import SampleService
from corral.controller.staging.locations import FileLocations
from corral.controller.web.charts import OF_NODE, charts_of, measured, range_links
from corral.controller.web.model_files import node_files_table
from corral.controller.web.navigation import NODES
from corral.controller.web.node_details import backends_on, device_lines, history_lines, node_facts, replica_lines
from corral.controller.web.overview_page import Span, known_range
from corral.controller.web.page_context import Gone, Page, PageContext, Shown
from corral.controller.web.pages import load_pages
from corral.controller.web.placement_map import box_of
from corral.controller.web.rows import row_of
from corral.controller.web.words import node_href

Name = Annotated[str, Parameter(max_length=255)]


class NodeReader:
    """What the page of a node is made of."""

    def __init__(
        self,
        context: PageContext,
        nodes: NodeAdmin,
        replica_rows: ReplicaListing,
        installed: BackendViews,
        samples: SampleService,
        span: str,
    ) -> None:
        self._context = context
        self._nodes = nodes
        self._replicas = replica_rows
        self._installed = installed
        self._samples = samples
        self.span = span

    async def fill(self, name: str) -> Shown:
        now = self._context.now()
        node = await self._nodes.view(name)
        desired = await self._replicas.desired()
        series = await self._samples.series("node", node.id, self.span)
        return {
            "node": node,
            "row": row_of(node, now),
            "facts_of_node": node_facts(node, desired),
            "box": box_of(node, [row for row in desired if row.node_id == node.id]),
            "devices": device_lines(node.devices),
            "replicas": replica_lines(await self._replicas.list_(node_id=node.id), now),
            "backends": backends_on(node.id, await self._installed.matrix()),
            "history": history_lines(await self._nodes.history(node.id), now),
            "ranges": range_links(self.span),
            "charts": measured(charts_of(OF_NODE, series, self.span)),
            "address": node_href(node.name),
        }


@get("/nodes/{name:str}")
async def node_page(context: PageContext, node_reader: NodeReader, name: Name) -> Page:
    part = f"/page/node/{node_href(name).removeprefix('/nodes/')}?range={node_reader.span}"
    return await context.page("node.html", NODES, part, lambda: node_reader.fill(name), gone=Gone("node", name))


@get("/page/node/{name:str}", guards=[viewers])
async def node_part(context: PageContext, node_reader: NodeReader, name: Name) -> Page:
    return await context.part("node_part.html", lambda: node_reader.fill(name))


@get("/page/node-files", guards=[viewers])
async def node_files_part(nodes: NodeAdmin, locations: FileLocations, operations: Operations, node: Name) -> Page:
    """The node is queried now."""
    held = await locations.on_node((await nodes.view(node)).id)
    table = node_files_table(held, await operations.list_views(loads=True))
    return load_pages().page("node_files_part.html", table=table)


async def _node_reader(
    context: PageContext,
    nodes: NodeAdmin,
    replica_rows: ReplicaListing,
    installed: BackendViews,
    samples: SampleService,
    span: Span = "1h",
) -> NodeReader:
    return NodeReader(context, nodes, replica_rows, installed, samples, known_range(span))


PAGES = (node_page,)
PARTS = (node_part, node_files_part)
DEPENDENCIES = {"node_reader": Provide(_node_reader)}
