"""What every page of the fleet does: ask who it is, send strangers away, show the header and the strip of what goes on.
Pages hand in what is their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

from litestar import Response
from litestar.di import Provide
from litestar.params import Parameter

from corral.contract.admin import Cluster, OperationView
from corral.controller.access.keys import Access
from corral.controller.access.principal import Principal, Role
from corral.controller.api.auth import SESSION_COOKIE, principal_of
from corral.controller.api.overview import Overview
from corral.controller.operations.service import Operations
from corral.controller.web.attention import facts_of
from corral.controller.web.list_filter import ListFilter
from corral.controller.web.navigation import FLEET_ROLES, START, is_place, places_for
from corral.controller.web.operations import RUNNING_SHOWN, work_of
from corral.controller.web.pages import load_pages, see_other, trouble
from corral.controller.web.shared_parts import SharedParts
from corral.controller.web.sign_in import AnyRequest, SignIn, drop_session, is_secure, signed_in
from corral.kit.errors import NotFound

ENDED = "/login?why=ended"
Page = Response[str] | Response[bytes]
Shown = dict[str, Any]
Fill = Callable[[], Awaitable[Shown]]


@dataclass(frozen=True)
class Gone:
    """A thing that a link names and that does not exist (any more): old requests name it too."""

    kind: str  # node, model
    name: str


class PageContext:
    def __init__(
        self, request: AnyRequest, access: Access, overview: Overview, operations: Operations, sign_in_service: SignIn
    ) -> None:
        self._request = request
        self._access = access
        self._overview = overview
        self._operations = operations
        self._sign_in = sign_in_service
        self._running: tuple[list[OperationView], int] | None = None  # the start page and the strip show the same

    async def running(self) -> tuple[list[OperationView], int]:
        """The newest operations that have not ended, and how many there are; read once for a page."""
        if self._running is None:
            self._running = await self._operations.list_running(RUNNING_SHOWN)
        return self._running

    def now(self) -> datetime:
        return self._sign_in.now()

    def base_url(self) -> str:
        """As the browser has it."""
        scheme = "https" if is_secure(self._request) else "http"
        return f"{scheme}://{self._request.headers.get('host', 'localhost')}"

    async def page(
        self,
        template: str,
        here: str,
        part: str,
        fill: Fill,
        *,
        roles: frozenset[Role] = FLEET_ROLES,
        gone: Gone | None = None,
    ) -> Page:
        """`here`: its place in the navigation; `part`: where its script finds what changes; `fill`: what only this one
        shows; `roles`: who sees it. Others are led to their own start page. `gone`: what the page says where `fill`
        does not find the thing that it is about."""
        who = await signed_in(self._request, self._access)
        if who is None:
            return send_away(self._request)
        if who.role not in roles:
            return see_other(START[who.role])
        status = 200
        try:
            shown = await fill()
        except NotFound as error:
            if gone is None:
                raise
            template, part, status = "gone.html", "", 404
            shown = {"kind": gone.kind, "name": gone.name, "all": here, "sentence": f"{error.message}."}
        if who.role not in FLEET_ROLES:  # nothing of the fleet, also not around the page
            return load_pages().page(template, here=here, part=part, work=(), work_more=0, **self._own(who), **shown)
        head = self._head(who, shown.pop("cluster", None) or await self._overview.read_without_nodes())
        return load_pages().page(template, status=status, here=here, part=part, **await self._work(), **head, **shown)

    async def strip(self) -> Page:
        return load_pages().page("_work.html", **await self._work())

    async def part(self, template: str, fill: Fill) -> Page:
        """For the script; a guard has asked who it is."""
        return load_pages().drawn(await self._part(template, fill))

    async def shared_part(self, shared: SharedParts, template: str, key: str, fill: Fill) -> Page:
        """The same for everybody of a role: it shows nothing of the person who asks."""
        role = principal_of(self._request).role
        return load_pages().drawn(await shared.text((template, key, role), lambda: self._part(template, fill)))

    async def _part(self, template: str, fill: Fill) -> str:
        shown = await fill()
        head = self._head(
            principal_of(self._request), shown.pop("cluster", None) or await self._overview.read_without_nodes()
        )
        return load_pages().text(template, **head, **shown)

    async def _work(self) -> Shown:
        work, more = work_of(*await self.running())
        return {"work": work, "work_more": more}

    def _head(self, who: Principal, cluster: Cluster) -> Shown:
        return {**self._own(who), "facts": facts_of(cluster)}

    def _own(self, who: Principal) -> Shown:
        """Of the person alone."""
        return {
            "who": who,
            "admin": who.role is Role.ADMIN,
            "places": places_for(who.role),
            "now": self.now().isoformat(),
            "facts": (),
        }


def send_away(request: AnyRequest) -> Page:
    """To the sign-in, which leads back."""
    wanted = _address(request)
    if SESSION_COOKIE in request.cookies:
        response = see_other(ENDED)
        drop_session(response)
        return response
    # A strict cookie stays at home when somebody follows a link from another site. Our own page asking again brings it.
    if request.headers.get("sec-fetch-site") == "cross-site" and "again" not in request.query_params:
        return trouble(
            200, "One moment", "Opening Corral.", refresh=f"0; url={wanted}{'&' if '?' in wanted else '?'}again"
        )
    return see_other("/login" if wanted == "/" else f"/login?next={quote(wanted)}")


def _address(request: AnyRequest) -> str:
    """Path and query as they were asked for, safe in a header; a page that is none of ours is the start page."""
    query = request.scope["query_string"].decode("latin-1")
    path = quote(request.scope["path"], safe="/:@~!$&()*+,;=-._")
    wanted = f"{path}?{query}" if query and query != "again" else path
    return wanted if is_place(wanted) else "/"


async def _context(
    request: AnyRequest, access: Access, overview: Overview, operations: Operations, sign_in_service: SignIn
) -> PageContext:
    return PageContext(request, access, overview, operations, sign_in_service)


async def _filters_of(
    only: Annotated[str, Parameter(max_length=20)] = "",
    find: Annotated[str, Parameter(max_length=255)] = "",
    at: Annotated[int, Parameter(ge=0, le=1_000_000)] = 0,
) -> ListFilter:
    return ListFilter(only, find, at)


DEPENDENCIES = {"context": Provide(_context), "filters": Provide(_filters_of)}
