"""Operations: requested changes of backends, their progress per node, and how to control them
(docs/reference/wire/operations.md). Rollouts: upgrades that proceed by hardware class (docs/reference/rollouts.md).
"""

from __future__ import annotations

from urllib.parse import urlencode

from corral.client.connection import ApiConnection, segment
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
from corral.contract.rollouts import RolloutList, RolloutView

_PAGE = 50  # operations of a thousand nodes, in one answer
_MAX_LIMIT = 1000


class Operations:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self, *, everything: bool = False, rows: bool = True) -> tuple[OperationView, ...]:
        """Active operations; with `everything` also ended ones, newest first. Without `rows`, faster and without
        details per node."""
        request = {"limit": str(_PAGE if everything and rows else _MAX_LIMIT)} | ({} if rows else {"rows": "false"})
        if not everything:
            return await self._list(request)
        found: tuple[OperationView, ...] = ()
        while page := await self._list({"all": "true"} | request | ({"after": found[-1].job_id} if found else {})):
            found += page
            if len(page) < int(request["limit"]):
                break
        return found

    async def _list(self, request: dict[str, str]) -> tuple[OperationView, ...]:
        return (await self._api.call("GET", f"/api/operations?{urlencode(request)}", OperationList)).operations

    async def get(self, operation_id: str) -> OperationView:
        return await self._api.call("GET", f"/api/operations/{segment(operation_id)}", OperationView)

    async def ask(self, request: OperationBody) -> JobAccepted:
        """Accepted does not mean done: watch the returned operation."""
        return await self._api.call("POST", "/api/operations", JobAccepted, request)

    async def plan(self, request: OperationBody) -> PlanView:
        """What `ask` would do, without doing it."""
        return await self._api.call("POST", "/api/operations?plan=true", PlanView, request)

    async def cancel(self, operation_id: str, *, node: str = "") -> Steered:
        """Withdraw the request and stop transfers; only on one node if it is given."""
        return await self._api.call("POST", _path(operation_id, "cancel", node), Steered)

    async def withdraw(self, operation_id: str) -> Steered:
        """Withdraw the request; running work continues."""
        return await self._api.call("POST", _path(operation_id, "withdraw"), Steered)

    async def retry(self, operation_id: str, *, node: str = "") -> Steered:
        """Retry now. A withdrawn operation is requested again and gets another id."""
        return await self._api.call("POST", _path(operation_id, "retry", node), Steered)

    async def dismiss(self, operation_id: str) -> Steered:
        """Remove it from the list; the operation itself goes on."""
        return await self._api.call("POST", _path(operation_id, "dismiss"), Steered)

    async def history(self) -> tuple[OperationRecord, ...]:
        """Ended operations, newest first."""
        return (await self._api.call("GET", "/api/operations/history", OperationHistory)).operations

    async def clear_history(self) -> None:
        await self._api.call_raw("DELETE", "/api/operations/history")


def events_of(operation_id: str) -> str:
    """The event path of one operation, for `Client.follow`."""
    return f"/api/operations/{segment(operation_id)}/events"


def _path(operation_id: str, what: str, node: str = "") -> str:
    query = "?" + urlencode({"node": node}) if node else ""
    return f"/api/operations/{segment(operation_id)}/{what}{query}"


class RolloutsApi:
    """Upgrades that proceed by hardware class, and how to steer them."""

    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self) -> tuple[RolloutView, ...]:
        """Newest first."""
        return (await self._api.call("GET", "/api/rollouts", RolloutList)).rollouts

    async def get(self, operation_id: str) -> RolloutView:
        return await self._api.call("GET", f"/api/rollouts/{segment(operation_id)}", RolloutView)

    async def steer(self, operation_id: str, action: str) -> Steered:
        """`action`: pause, resume, promote, abort."""
        return await self._api.call("POST", f"/api/rollouts/{segment(operation_id)}/{segment(action)}", Steered)
