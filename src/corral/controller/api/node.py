"""`/api/node/…`: the requests of workers about their own node (docs/reference/wire/nodes.md#node-api)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from litestar import Controller, Request, Response, delete, get, post

from corral.contract.codec import Message, Undecodable, decode, encode
from corral.contract.messages.artifacts import ArtifactRequest
from corral.contract.messages.blobs import AnnounceBlobs
from corral.contract.messages.nodes import HttpHeartbeat, RegisterNode
from corral.controller.access.keys import Access
from corral.controller.api.auth import bearer_of, seen_from
from corral.controller.artifacts.service import Artifacts
from corral.controller.files.swarm.blob_peers import BlobPeers
from corral.controller.registry.admission import NodeApi, NodeCaller
from corral.controller.replicas.listing import ReplicaListing
from corral.kit.errors import Invalid, Unauthenticated

AnyRequest = Request[Any, Any, Any]
T = TypeVar("T", bound=Message)


class RefreshCredentials(Message, frozen=True):
    csr: str = ""


class NodeApiRoutes(Controller):
    """Guarded by the node's own token, not by API keys; registration by a join token."""

    path = "/api/node"
    tags = ("node self-service",)

    @post("/register", summary="Register a worker, new or returning", status_code=201)
    async def register(self, request: AnyRequest, node_api: NodeApi, access: Access) -> Response[bytes]:
        caller = await _caller(request, access)
        return _json(await node_api.register(await _body(request, RegisterNode), caller), 201)

    @post(
        "/{node_id:str}/credentials",
        summary="Renew the bus credentials and the certificate of a worker",
        status_code=200,
    )
    async def credentials(
        self, request: AnyRequest, node_id: str, node_api: NodeApi, access: Access
    ) -> Response[bytes]:
        caller = await _caller(request, access)
        request_body = await _body(request, RefreshCredentials)
        return _json(await node_api.refresh(node_id, request_body.csr, caller))

    @post("/{node_id:str}/heartbeat", summary="Report a heartbeat", status_code=200)
    async def heartbeat(self, request: AnyRequest, node_id: str, node_api: NodeApi, access: Access) -> Response[bytes]:
        caller = await _caller(request, access)
        beat = await _body(request, HttpHeartbeat)
        return _json(await node_api.heartbeat(node_id, beat, caller))

    @post("/{node_id:str}/drain", summary="Drain the calling worker's node", status_code=200)
    async def drain(self, request: AnyRequest, node_id: str, node_api: NodeApi, access: Access) -> dict[str, str]:
        await node_api.drain(node_id, await _caller(request, access))
        return {"message": "node set to draining"}

    @post("/{node_id:str}/resume", summary="Resume the calling worker's node", status_code=200)
    async def resume(self, request: AnyRequest, node_id: str, node_api: NodeApi, access: Access) -> dict[str, str]:
        await node_api.resume(node_id, await _caller(request, access))
        return {"message": "node resumed"}

    @post("/{node_id:str}/deregister", summary="Report that the worker leaves", status_code=200)
    async def deregister(self, request: AnyRequest, node_id: str, node_api: NodeApi, access: Access) -> dict[str, str]:
        await node_api.deregister(node_id, await _caller(request, access))
        return {"message": "node set to offline"}

    @delete("/{node_id:str}", summary="Report that the worker leaves", status_code=200)
    async def leave(self, request: AnyRequest, node_id: str, node_api: NodeApi, access: Access) -> dict[str, str]:
        await node_api.deregister(node_id, await _caller(request, access))
        return {"message": "node set to offline"}

    @post(
        "/{node_id:str}/artifacts",
        summary="List the blobs of a source that the calling worker was ordered to install, and fetch missing ones",
        status_code=200,
    )
    async def artifacts(
        self, request: AnyRequest, node_id: str, node_api: NodeApi, access: Access, artifacts: Artifacts
    ) -> Response[bytes]:
        await node_api.authenticate(node_id, await _caller(request, access))
        return _json(await artifacts.offer(node_id, await _body(request, ArtifactRequest)))

    @post("/{node_id:str}/blobs", summary="Announce blobs, and ask which workers have the wanted ones", status_code=200)
    async def blobs(
        self, request: AnyRequest, node_id: str, node_api: NodeApi, access: Access, blob_peers: BlobPeers
    ) -> Response[bytes]:
        node = await node_api.authenticate(node_id, await _caller(request, access))
        announced = await _body(request, AnnounceBlobs)
        url = node.ingress_url.rstrip("/") if node.protocol else ""
        return _json(blob_peers.exchange(node.id, node.name, url, announced))

    @get("/{node_id:str}/models", summary="List the replicas that the controller expects on the calling worker")
    async def models(
        self, request: AnyRequest, node_id: str, node_api: NodeApi, access: Access, replica_rows: ReplicaListing
    ) -> list[dict[str, object]]:
        await node_api.authenticate(node_id, await _caller(request, access))
        return await replica_rows.list_(node_id=node_id)


async def _caller(request: AnyRequest, access: Access) -> NodeCaller:
    bearer = bearer_of(request)
    if bearer is None:
        raise Unauthenticated("registration token required")
    host = request.headers.get("x-forwarded-host") or request.headers.get("host") or ""
    return NodeCaller(bearer=bearer, seen_from=await seen_from(request, access), reached_us_at=host)


async def _body(request: AnyRequest, kind: type[T]) -> T:
    try:
        return decode(kind, await request.body())
    except Undecodable as error:
        raise Invalid(f"invalid request body: {error}") from error


def _json(message: msgspec.Struct, status: int = 200) -> Response[bytes]:
    return Response(encode(message), status_code=status, media_type="application/json")
