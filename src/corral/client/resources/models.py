"""The catalogue of models, the number of replicas of each, and uploads of model files. A name may contain slashes."""

from __future__ import annotations

from urllib.parse import quote

from corral.client.connection import ApiConnection, segment
from corral.contract.admin import JobAccepted
from corral.contract.catalogue import (
    AvailableModel,
    CollectedView,
    EditModel,
    InstallModel,
    ModelChanged,
    ModelFilesView,
    ModelView,
    ScheduleBody,
    ScheduleView,
    StageBody,
)
from corral.contract.installs import InstallPlan, OpenUpload, PlanModel, UploadOpened, UploadView

COLLECT_S = 90.0  # a node may remove a hundred gigabytes
GALLERIES_S = 120.0  # the gateway's timeout for the controller: galleries may be slow the first time


class Models:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self) -> tuple[ModelView, ...]:
        """In the order of their names."""
        return await self._api.call("GET", "/api/models", tuple[ModelView, ...])

    async def get(self, model: str) -> ModelView:
        """With its whole definition."""
        return await self._api.call("GET", f"/api/models/{segment(model)}", ModelView)

    async def available(self, term: str = "") -> tuple[AvailableModel, ...]:
        """Entries of galleries with all these words in their name, description or tags."""
        path = "/api/models/available" + (f"?term={quote(term, safe='')}" if term else "")
        return await self._api.call("GET", path, tuple[AvailableModel, ...], timeout_s=GALLERIES_S)

    async def get_available(self, model: str) -> AvailableModel:
        """One entry of a gallery, with the definition that installing it would give."""
        path = f"/api/models/available/{segment(model)}"
        return await self._api.call("GET", path, AvailableModel, timeout_s=GALLERIES_S)

    async def plan(self, request: PlanModel) -> InstallPlan:
        """What an install from a source would do."""
        return await self._api.call("POST", "/api/model-plans", InstallPlan, request, timeout_s=GALLERIES_S)

    async def install(self, request: InstallModel, *, plan: bool = False) -> ModelChanged:
        """`plan`: only say whether it would be refused."""
        path = "/api/models" + ("?plan=true" if plan else "")
        return await self._api.call("POST", path, ModelChanged, request, timeout_s=GALLERIES_S)

    async def replace(self, model: str, request: EditModel, *, plan: bool = False) -> ModelChanged:
        """Replace the whole definition. `plan`: only say how its soak would go."""
        return await self._edit("PUT", model, request, plan=plan)

    async def change(self, model: str, request: EditModel, *, plan: bool = False) -> ModelChanged:
        """Change some keys of the definition. `plan`: only say how its soak would go."""
        return await self._edit("PATCH", model, request, plan=plan)

    async def _edit(self, method: str, model: str, request: EditModel, *, plan: bool) -> ModelChanged:
        path = f"/api/models/{segment(model)}" + ("?plan=true" if plan else "")
        return await self._api.call(method, path, ModelChanged, request)

    async def delete(self, model: str, *, force: bool = False) -> ModelChanged:
        path = f"/api/models/{segment(model)}" + ("?force=true" if force else "")
        return await self._api.call("DELETE", path, ModelChanged)

    async def files(self, model: str) -> ModelFilesView:
        """The files of a model, and how much of them each node has."""
        return await self._api.call("GET", f"/api/models/{segment(model)}/files", ModelFilesView)

    async def stage(self, model: str, request: StageBody) -> JobAccepted:
        """Accepted does not mean done: watch the returned operation."""
        return await self._api.call("POST", f"/api/models/{segment(model)}/stage", JobAccepted, request)

    async def collect(self, *, dry_run: bool = False) -> CollectedView:
        """Remove files that no model needs, on the controller and on all nodes."""
        path = "/api/models/gc" + ("?dry_run=true" if dry_run else "")
        return await self._api.call("POST", path, CollectedView, timeout_s=COLLECT_S)

    async def schedules(self) -> tuple[ScheduleView, ...]:
        return await self._api.call("GET", "/api/nodes/scheduling", tuple[ScheduleView, ...])

    async def schedule(self, model: str) -> ScheduleView:
        return await self._api.call("GET", f"/api/nodes/scheduling/{segment(model)}", ScheduleView)

    async def set_schedule(self, request: ScheduleBody) -> ScheduleView:
        return await self._api.call("POST", "/api/nodes/scheduling", ScheduleView, request)

    async def delete_schedule(self, model: str) -> None:
        await self._api.call_raw("DELETE", f"/api/nodes/scheduling/{segment(model)}")


PIECE_S = 300.0


class Uploads:
    """Uploads of files in pieces, by their SHA-256."""

    def __init__(self, api: ApiConnection, path: str = "/api/uploads") -> None:
        self._api = api
        self._path = path

    async def get(self, sha256: str) -> UploadView:
        return await self._api.call("GET", f"{self._path}/{segment(sha256)}", UploadView)

    async def open(self, request: OpenUpload) -> UploadOpened:
        """Begin or continue the operation. Raises Gone if it was cancelled."""
        return await self._api.call("POST", self._path, UploadOpened, request, timeout_s=PIECE_S)

    async def append(
        self, sha256: str, offset: int, size_bytes: int, data: bytes, *, operation: str = ""
    ) -> UploadView:
        """Raises Conflict if the upload stands at another position, and if the controller does not know the operation
        (any more)."""
        path = f"{self._path}/{segment(sha256)}?offset={offset}&size={size_bytes}"
        path += f"&operation={segment(operation)}" if operation else ""
        return await self._api.put_bytes(path, UploadView, data, timeout_s=PIECE_S)

    async def cancel(self, sha256: str) -> None:
        await self._api.call_raw("DELETE", f"{self._path}/{segment(sha256)}")
