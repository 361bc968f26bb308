"""Uploads of files to the controller, in pieces, by their SHA-256."""

from __future__ import annotations

from corral.client.connection import ApiConnection, segment
from corral.contract.installs import UploadView

PIECE_S = 300.0


class Uploads:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def get(self, sha256: str) -> UploadView:
        return await self._api.call("GET", f"/api/uploads/{segment(sha256)}", UploadView)

    async def append(self, sha256: str, offset: int, size_bytes: int, data: bytes) -> UploadView:
        """Raises Conflict if the upload stands at another position."""
        path = f"/api/uploads/{segment(sha256)}?offset={offset}&size={size_bytes}"
        return await self._api.put_bytes(path, UploadView, data, timeout_s=PIECE_S)

    async def cancel(self, sha256: str) -> None:
        await self._api.call_raw("DELETE", f"/api/uploads/{segment(sha256)}")
