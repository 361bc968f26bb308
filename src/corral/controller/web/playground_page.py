"""`/playground`: models used from the page, and `/usage`: what the key that is signed in has used. Only the playground
needs its script, which calls `api/playground.py` and `/v1`."""

from __future__ import annotations

from litestar import get

from corral.controller.access.keys import Access
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.gateways.running import RunningRequests
from corral.controller.web.navigation import MODEL_ROLES, PLAYGROUND, USAGE
from corral.controller.web.page_context import Page, PageContext, Shown
from corral.controller.web.requests import request_lines, running_lines
from corral.controller.web.sign_in import AnyRequest, signed_in

_SHOWN = 50
_RUNNING_WAIT_S = 0.5  # for the gateways: this page does not refresh itself


@get(PLAYGROUND)
async def playground_page(context: PageContext) -> Page:
    return await context.page("playground.html", PLAYGROUND, "", _nothing, roles=MODEL_ROLES)


@get(USAGE)
async def usage_page(
    context: PageContext, request: AnyRequest, access: Access, receipts: ReceiptService, running: RunningRequests
) -> Page:
    async def fill() -> Shown:
        who = await signed_in(request, access)
        if who is None:
            return {"used": None, "lines": (), "running": ()}
        in_progress = await running.list_views(key_id=who.key_id, wait_s=_RUNNING_WAIT_S)
        views = await receipts.list_own(who.key_id, limit=_SHOWN)
        return {
            "used": (await receipts.usage_by_key()).get(who.key_id),
            "lines": request_lines(views, context.now()),
            "running": running_lines(in_progress.requests),
        }

    return await context.page("usage.html", USAGE, "", fill, roles=MODEL_ROLES)


async def _nothing() -> Shown:
    return {}


PAGES = (playground_page, usage_page)
