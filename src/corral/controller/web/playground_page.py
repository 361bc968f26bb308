"""`/playground`: models used from the page. The only page that needs its script, which calls `api/playground.py` and
`/v1`."""

from __future__ import annotations

from litestar import get

from corral.controller.web.navigation import MODEL_ROLES, PLAYGROUND
from corral.controller.web.page_context import Page, PageContext, Shown


@get(PLAYGROUND)
async def playground_page(context: PageContext) -> Page:
    return await context.page("playground.html", PLAYGROUND, "", _nothing, roles=MODEL_ROLES)


async def _nothing() -> Shown:
    return {}


PAGES = (playground_page,)
