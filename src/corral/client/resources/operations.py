"""Operations: what people asked of backends, how far each node is, and how to steer it
(docs/reference/wire/operations.md)."""

from __future__ import annotations

from urllib.parse import urlencode

from corral.client.caller import Caller, segment
from corral.contract.admin import (
    JobAccepted,
    OperationBody,
    OperationHistory,
    OperationList,
    OperationRecord,
    OperationView,
    PlanView,
    Steered,
)

_PAGE = 50  # operations of a thousand nodes, in one answer
_MOST = 1000


class Operations:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def list(self, *, everything: bool = False, rows: bool = True) -> tuple[OperationView, ...]:
        """Those that are not done; or also those that are, newest first. Without `rows` not node by node, but quick."""
        asked = {"limit": str(_PAGE if everything and rows else _MOST)} | ({} if rows else {"rows": "false"})
        if not everything:
            return await self._list(asked)
        found: tuple[OperationView, ...] = ()
        while page := await self._list({"all": "true"} | asked | ({"after": found[-1].job_id} if found else {})):
            found += page
            if len(page) < int(asked["limit"]):
                break
        return found

    async def _list(self, asked: dict[str, str]) -> tuple[OperationView, ...]:
        return (await self._caller.call("GET", f"/api/operations?{urlencode(asked)}", OperationList)).operations

    async def get(self, operation_id: str) -> OperationView:
        return await self._caller.call("GET", f"/api/operations/{segment(operation_id)}", OperationView)

    async def ask(self, wanted: OperationBody) -> JobAccepted:
        """Accepted is not done: follow the operation it names."""
        return await self._caller.call("POST", "/api/operations", JobAccepted, wanted)

    async def plan(self, wanted: OperationBody) -> PlanView:
        """What `ask` would do. Nothing is stored, nothing is sent."""
        return await self._caller.call("POST", "/api/operations?plan=true", PlanView, wanted)

    async def cancel(self, operation_id: str, *, node: str = "") -> Steered:
        """Take back what was asked and stop the bytes; on one node only where it is named."""
        return await self._caller.call("POST", _door(operation_id, "cancel", node), Steered)

    async def withdraw(self, operation_id: str) -> Steered:
        """Take back what was asked; what runs may end."""
        return await self._caller.call("POST", _door(operation_id, "withdraw"), Steered)

    async def retry(self, operation_id: str, *, node: str = "") -> Steered:
        """Try again now. One that was taken back is asked for anew, and has another id then."""
        return await self._caller.call("POST", _door(operation_id, "retry", node), Steered)

    async def dismiss(self, operation_id: str) -> Steered:
        """Out of the list; what it asked for goes on."""
        return await self._caller.call("POST", _door(operation_id, "dismiss"), Steered)

    async def history(self) -> tuple[OperationRecord, ...]:
        """Those that ended, newest first."""
        return (await self._caller.call("GET", "/api/operations/history", OperationHistory)).operations

    async def clear_history(self) -> None:
        await self._caller.call_raw("DELETE", "/api/operations/history")


def events_of(operation_id: str) -> str:
    """Where one operation is followed: for `Client.follow`."""
    return f"/api/operations/{segment(operation_id)}/events"


def _door(operation_id: str, what: str, node: str = "") -> str:
    query = "?" + urlencode({"node": node}) if node else ""
    return f"/api/operations/{segment(operation_id)}/{what}{query}"
