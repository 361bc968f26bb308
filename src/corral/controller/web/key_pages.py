"""`/fleet/keys` and `/fleet/settings`, for administrators: who may use the fleet, and how its controller is set."""

from __future__ import annotations

from litestar import get

from corral.controller.access.keys import Access
from corral.controller.access.principal import Role
from corral.controller.api.auth import admins, principal_of
from corral.controller.gateways.receipts import MAX_COUNTED, ReceiptService
from corral.controller.web.keys import key_lines
from corral.controller.web.navigation import KEYS, SETTINGS
from corral.controller.web.page_context import Page, PageContext, Shown
from corral.controller.web.settings import EffectiveSettings
from corral.controller.web.sign_in import AnyRequest, signed_in

_ADMINS = frozenset((Role.ADMIN,))


@get(KEYS)
async def keys_page(context: PageContext, request: AnyRequest, access: Access, receipts: ReceiptService) -> Page:
    async def fill() -> Shown:
        who = await signed_in(request, access)
        return await _keys(context, access, receipts, who.key_id if who else "")

    return await context.page("keys.html", KEYS, "/page/keys", fill, roles=_ADMINS)


@get("/page/keys", guards=[admins])
async def keys_part(context: PageContext, request: AnyRequest, access: Access, receipts: ReceiptService) -> Page:
    own = principal_of(request).key_id
    return await context.part("keys_part.html", lambda: _keys(context, access, receipts, own))


@get(SETTINGS)
async def settings_page(context: PageContext, effective_settings: EffectiveSettings, find: str = "") -> Page:
    async def fill() -> Shown:
        return {"groups": effective_settings.groups(find), "find": find}

    return await context.page("settings.html", SETTINGS, "", fill, roles=_ADMINS)


async def _keys(context: PageContext, access: Access, receipts: ReceiptService, own: str) -> Shown:
    views = [view for view in await access.list_views() if view.role != Role.GATEWAY]
    lines = key_lines(views, await receipts.usage_by_key(), own, context.now())
    return {"lines": lines, "most": f"{MAX_COUNTED:,}"}


PAGES = (keys_page, settings_page)
PARTS = (keys_part,)
