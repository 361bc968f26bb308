"""The fleet as one file."""

from __future__ import annotations

from urllib.parse import urlencode

from corral.client.caller import Caller, segment
from corral.contract.fleet import ApplyBody, FleetDiff, FleetFile
from corral.contract.receipts import RequestList, RequestView
from corral.contract.why import WhyModel, WhyNode

_GALLERIES_S = 120.0  # models of galleries are looked up


class FleetFiles:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def apply(self, asked: ApplyBody) -> FleetDiff:
        return await self._caller.call("POST", "/api/apply", FleetDiff, asked, timeout_s=_GALLERIES_S)

    async def export(self) -> FleetFile:
        return await self._caller.call("GET", "/api/export", FleetFile)


class Why:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def model(self, name: str) -> WhyModel:
        return await self._caller.call("GET", f"/api/why/models/{segment(name)}", WhyModel)

    async def node(self, id_or_name: str) -> WhyNode:
        return await self._caller.call("GET", f"/api/why/nodes/{segment(id_or_name)}", WhyNode)


_PAGE = 500


class Requests:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def list(
        self, *, limit: int, model: str = "", key: str = "", node: str = "", since: str = "", failed: bool = False
    ) -> tuple[RequestView, ...]:
        """The newest first, so many of them. `since`: a moment as RFC 3339."""
        wanted = {"model": model, "key": key, "node": node, "since": since, "failed": "true" if failed else ""}
        asked = {name: value for name, value in wanted.items() if value}
        found: tuple[RequestView, ...] = ()
        before = ""
        while len(found) < limit:
            page = {**asked, "limit": str(min(_PAGE, limit - len(found)))} | ({"before": before} if before else {})
            told = await self._caller.call("GET", f"/api/requests?{urlencode(page)}", RequestList)
            found += told.requests
            before = told.next
            if not before:
                break
        return found
