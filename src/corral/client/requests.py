"""Requests for models: what became of them."""

from __future__ import annotations

from urllib.parse import urlencode

from corral.client.caller import Caller
from corral.contract.receipts import RequestList, RequestView

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
