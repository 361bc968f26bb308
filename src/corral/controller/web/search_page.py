"""`/search`: what the field in the header finds, as a page and as the list below the field."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote, urlencode

from litestar import get
from litestar.di import Provide
from litestar.params import Parameter

from corral.controller.api.auth import viewers
from corral.controller.api.overview import Overview
from corral.controller.models.service import Models
from corral.controller.operations.backend_views import BackendViews
from corral.controller.operations.service import Operations
from corral.controller.web.navigation import BACKENDS, OPERATIONS
from corral.controller.web.operations import lines_of
from corral.controller.web.page_context import Page, PageContext, Shown
from corral.controller.web.search import MAX_OF_A_KIND, MAX_ON_THE_PAGE, Candidate, search
from corral.controller.web.words import counted, model_href, node_href

Query = Annotated[str, Parameter(max_length=200)]


class SearchReader:
    """What can be found."""

    def __init__(
        self,
        context: PageContext,
        overview: Overview,
        models: Models,
        installed: BackendViews,
        operations: Operations,
    ) -> None:
        self._context = context
        self._overview = overview
        self._models = models
        self._installed = installed
        self._operations = operations

    async def fill(self, query: str, most: int) -> Shown:
        return {"query": query, "groups": search(await self._candidates(), query, most) if query.strip() else ()}

    async def _candidates(self) -> list[Candidate]:
        _, nodes = await self._overview.read_with_nodes()
        found = [
            Candidate(
                "Node", node.name, node_href(node.name), node.platform, node.status,
                " ".join(f"{key}={value}" for key, value in node.labels.items()),
            )
            for node in nodes
        ]  # fmt: skip
        for model in await self._models.list_views():
            words = f"stands for {model.alias}" if model.alias else model.backend
            found.append(Candidate("Model", model.id, model_href(model.id), words, "", " ".join(model.tags)))
        for row in (await self._installed.matrix()).backends:
            have = sum(cell.installed for cell in row.nodes.values())
            words = f"on {counted(have, 'node', 'nodes')}"
            found.append(Candidate("Backend", row.backend, f"{BACKENDS}#backend-{quote(row.backend)}", words))
        for line in lines_of(await self._operations.list_views(rows=False), self._context.now(), {}):
            href = f"{OPERATIONS}?open={quote(line.id)}#op-{quote(line.id)}"
            found.append(Candidate("Operation", line.what, href, line.where, line.state, line.id))
        return found


@get("/search")
async def search_page(context: PageContext, search_reader: SearchReader, q: Query = "") -> Page:
    part = f"/page/search?{urlencode({'q': q, 'all': 'true'})}"
    return await context.page("search.html", "/search", part, lambda: search_reader.fill(q, MAX_ON_THE_PAGE))


@get("/page/search", guards=[viewers])
async def search_part(context: PageContext, search_reader: SearchReader, q: Query = "", all: bool = False) -> Page:
    if all:
        return await context.part("search_part.html", lambda: search_reader.fill(q, MAX_ON_THE_PAGE))
    return await context.part("search_hits.html", lambda: search_reader.fill(q, MAX_OF_A_KIND))


async def _search_reader(
    context: PageContext, overview: Overview, models: Models, installed: BackendViews, operations: Operations
) -> SearchReader:
    return SearchReader(context, overview, models, installed, operations)


PAGES = (search_page,)
PARTS = (search_part,)
DEPENDENCIES = {"search_reader": Provide(_search_reader)}
