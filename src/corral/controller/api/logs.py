"""`/api/nodes/:id/backend-logs…`: the output of a node's backends; `/api/nodes/:id/log`: what its worker logs itself.
Both are read from the node.

See docs/reference/wire/http-nodes.md#backend-logs. An unknown node is 404; a node that does not answer, or not with
logs, is 502.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any
from urllib.parse import quote

from litestar import Controller, Request, Response, get
from litestar.params import Parameter
from litestar.response import Stream

from corral.controller.access.keys import Access
from corral.controller.access.principal import Principal
from corral.controller.api.auth import principal_of, viewers
from corral.controller.registry.ingress_client import OWN_LOG, IngressClient
from corral.controller.registry.nodes import NodeAdmin
from corral.kit.errors import CorralError, NotFound
from corral.store.tables.nodes import Node

LOGS = "/v1/backend-logs"
Tail = Annotated[int | None, Parameter(ge=0, le=100_000, description="Number of last lines")]
Follow = Annotated[bool, Parameter(description="Follow new lines, one JSON object per line")]


class NodeLogRoutes(Controller):
    path = "/api/nodes/{node:str}/backend-logs"
    tags = ("backends of a node",)
    guards = (viewers,)

    @get("/", summary="List the models and backends of a node that have logs", media_type="application/json")
    async def names(self, nodes: NodeAdmin, ingresses: IngressClient, node: str) -> Response[bytes]:
        return Response(await ingresses.logs(await nodes.node(node), LOGS), media_type="application/json")

    @get(
        "/{model:path}",
        summary="Get the last log lines of a model or backend; `model#N` is one replica",
        media_type="application/json",
    )
    async def lines(
        self,
        request: Request[Any, Any, Any],
        access: Access,
        nodes: NodeAdmin,
        ingresses: IngressClient,
        node: str,
        model: str,
        tail: Tail = None,
        follow: Follow = False,
    ) -> Response[bytes] | Stream:
        return await _lines(request, access, ingresses, await nodes.node(node), path_of(model), tail, follow=follow)


@get(
    "/api/nodes/{node:str}/log",
    summary="Get the last lines that the worker of a node logged itself",
    media_type="application/json",
    tags=("nodes",),
    guards=(viewers,),
)
async def worker_log(
    request: Request[Any, Any, Any],
    access: Access,
    nodes: NodeAdmin,
    ingresses: IngressClient,
    node: str,
    tail: Tail = None,
    follow: Follow = False,
) -> Response[bytes] | Stream:
    found = await nodes.node(node)
    if found.protocol == 0:
        raise NotFound(
            f"{found.name} is a LocalAI worker, which offers only the logs of its backends; "
            "read its own log on that machine"
        )
    return await _lines(request, access, ingresses, found, OWN_LOG, tail, follow=follow)


async def _lines(
    request: Request[Any, Any, Any],
    access: Access,
    ingresses: IngressClient,
    node: Node,
    path: str,
    tail: int | None,
    *,
    follow: bool,
) -> Response[bytes] | Stream:
    query = [f"tail={tail}"] if tail is not None else []
    if follow:
        lines = await ingresses.follow(node, "?".join([path, "&".join([*query, "follow=true"])]))
        stream = _while_welcome(lines, access, principal_of(request))
        return Stream(stream, media_type="application/x-ndjson", headers={"Cache-Control": "no-store"})
    return Response(await ingresses.logs(node, "?".join([path, *query])), media_type="application/json")


async def _while_welcome(
    pieces: AsyncGenerator[bytes, None], access: Access, principal: Principal, recheck_s: float = 15.0
) -> AsyncIterator[bytes]:
    """Ends the stream soon after its key is revoked."""
    checked = time.monotonic()
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            if time.monotonic() - checked > recheck_s:
                with contextlib.suppress(CorralError):  # the database is away: no reason to think otherwise of anybody
                    if not await access.is_welcome(principal):
                        return
                checked = time.monotonic()
            yield piece


def path_of(model: str) -> str:
    """The path at the worker; a slash in a name is escaped."""
    return f"{LOGS}/{quote(model.removeprefix('/'), safe='')}"
