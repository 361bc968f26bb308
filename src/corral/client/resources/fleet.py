"""The fleet as a whole: its file (apply, export), the explanations of `corral why`, the latest requests, API keys, join
tokens of new machines, and the releases of Corral that it is upgraded to."""

from __future__ import annotations

from urllib.parse import urlencode

from corral.client.connection import ApiConnection, segment
from corral.contract.admin import CreateJoinToken, CreateKey, JoinTokenCreated, JoinTokenView, KeyCreated, KeyView
from corral.contract.fleet import ApplyBody, FleetDiff, FleetFile
from corral.contract.receipts import RequestList, RequestView, RunningList
from corral.contract.releases import (
    AddRelease,
    ChangeReleaseKey,
    FleetUpgradePlan,
    ReleaseList,
    ReleaseView,
    UpgradeFleet,
)
from corral.contract.why import WhyModel, WhyNode, WhyOperation, WhyRollout

_GALLERIES_S = 120.0  # models of galleries are looked up
_ASK_NODES_S = 60.0


class FleetFiles:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def apply(self, request: ApplyBody) -> FleetDiff:
        return await self._api.call("POST", "/api/apply", FleetDiff, request, timeout_s=_GALLERIES_S)

    async def export(self) -> FleetFile:
        return await self._api.call("GET", "/api/export", FleetFile)


class WhyApi:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def model(self, name: str) -> WhyModel:
        return await self._api.call("GET", f"/api/why/models/{segment(name)}", WhyModel)

    async def node(self, id_or_name: str) -> WhyNode:
        return await self._api.call("GET", f"/api/why/nodes/{segment(id_or_name)}", WhyNode)

    async def operation(self, operation_id: str) -> WhyOperation:
        return await self._api.call("GET", f"/api/why/operations/{segment(operation_id)}", WhyOperation)

    async def rollout(self, operation_id: str) -> WhyRollout:
        return await self._api.call("GET", f"/api/why/rollouts/{segment(operation_id)}", WhyRollout)


_PAGE = 500


class Requests:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(
        self,
        *,
        limit: int,
        model: str = "",
        key: str = "",
        node: str = "",
        since: str = "",
        failed: bool = False,
        status: str = "",
    ) -> tuple[RequestView, ...]:
        """The newest `limit` requests, newest first. `since`: a time in RFC 3339. `status`: `503`, `4xx` or `5xx`."""
        wanted = {"model": model, "key": key, "node": node, "since": since, "status": status}
        wanted["failed"] = "true" if failed else ""
        filters = {name: value for name, value in wanted.items() if value}
        found: tuple[RequestView, ...] = ()
        before = ""
        while len(found) < limit:
            page = {**filters, "limit": str(min(_PAGE, limit - len(found)))} | ({"before": before} if before else {})
            answer = await self._api.call("GET", f"/api/requests?{urlencode(page)}", RequestList)
            found += answer.requests
            before = answer.next
            if not before:
                break
        return found

    async def running(self, *, model: str = "", key: str = "", node: str = "") -> RunningList:
        """The requests under way, the oldest 200. A key of role inference gets its own."""
        filters = {name: value for name, value in {"model": model, "key": key, "node": node}.items() if value}
        query = f"?{urlencode(filters)}" if filters else ""
        return await self._api.call("GET", f"/api/requests/running{query}", RunningList)


class Keys:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self) -> tuple[KeyView, ...]:
        return await self._api.call("GET", "/api/keys", tuple[KeyView, ...])

    async def create(self, request: CreateKey) -> KeyCreated:
        return await self._api.call("POST", "/api/keys", KeyCreated, request)

    async def revoke(self, key_id: str) -> None:
        await self._api.call_raw("DELETE", f"/api/keys/{segment(key_id)}")


class Tokens:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self) -> tuple[JoinTokenView, ...]:
        return await self._api.call("GET", "/api/tokens", tuple[JoinTokenView, ...])

    async def create(self, request: CreateJoinToken) -> JoinTokenCreated:
        return await self._api.call("POST", "/api/tokens", JoinTokenCreated, request)

    async def revoke(self, token_id: str) -> None:
        await self._api.call_raw("DELETE", f"/api/tokens/{segment(token_id)}")


class ReleasesApi:
    """Releases of Corral, the key that signs them, and the upgrade of the fleet."""

    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self) -> ReleaseList:
        """Newest first."""
        return await self._api.call("GET", "/api/fleet/releases", ReleaseList)

    async def add(self, sha256: str, *, signed: str = "") -> ReleaseView:
        """After the wheel was uploaded."""
        return await self._api.call("POST", "/api/fleet/releases", ReleaseView, AddRelease(sha256, signed))

    async def change_key(self, public_key: str, *, proof: str = "", is_lost: bool = False) -> ReleaseList:
        request = ChangeReleaseKey(public_key, proof, is_lost, is_new=not public_key)
        return await self._api.call("PUT", "/api/fleet/release-key", ReleaseList, request)

    async def upgrade(self, request: UpgradeFleet) -> FleetUpgradePlan:
        """The plan; with an operation unless it is a dry run."""
        return await self._api.call("POST", "/api/fleet/upgrade", FleetUpgradePlan, request, timeout_s=_ASK_NODES_S)
