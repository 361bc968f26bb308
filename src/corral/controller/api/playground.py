"""`/api/playground/…`: what the playground of the page needs: a token for `/v1`, the models that it may use, and the
receipt of an answer. For keys that may use models; each sees its own requests only."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Controller, Request, Response, get, post
from litestar.params import Parameter

from corral.contract.codec import encode
from corral.contract.loads import LoadState
from corral.contract.playground import PlaygroundModel, PlaygroundToken
from corral.controller.access.signing import IngressTokens
from corral.controller.api.auth import model_users, principal_of
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.models.service import Models
from corral.controller.models.views import kinds_of, reads_images
from corral.controller.replicas.loads import LoadService
from corral.kit.errors import Denied

RequestId = Annotated[str, Parameter(max_length=255, description="`X-Request-Id` of the answer")]

ModelName = Annotated[str, Parameter(max_length=255)]
Since = Annotated[int, Parameter(ge=0, description="Answer when the version is higher than this")]
Wait = Annotated[float, Parameter(ge=0, le=10, description="Seconds to wait")]


class PlaygroundRoutes(Controller):
    path = "/api/playground"
    tags = ("playground",)
    guards = (model_users,)

    @post(
        "/token",
        status_code=200,
        summary="Create a token for `/v1` that lives at most 5 minutes and ends at sign-out; only with a web session",
    )
    async def token(self, request: Request[Any, Any, Any], ingress_tokens: IngressTokens) -> PlaygroundToken:
        principal = principal_of(request)
        if not principal.session:
            raise Denied("tokens of the playground are for the page; use the API key itself at /v1")
        return PlaygroundToken(*ingress_tokens.sign_for_playground(principal))

    @get("/models", summary="List the models that the caller may use, and what each is for")
    async def models(self, request: Request[Any, Any, Any], models: Models) -> list[PlaygroundModel]:
        principal, definitions = principal_of(request), await models.definitions()
        found = []
        for view in await models.list_views():
            definition = definitions.get(view.alias or view.id)
            if view.disabled or definition is None or not principal.may_use(view.id):
                continue
            found.append(
                PlaygroundModel(
                    name=view.id,
                    kinds=kinds_of(definition),
                    images=reads_images(definition),
                    ready=view.ready,
                    description=view.description,
                    alias=view.alias,
                )
            )
        return found

    @get(
        "/requests/{request_id:str}",
        summary="Get the receipt of one of the caller's own requests; null if no gateway has reported it in time",
        media_type="application/json",
    )
    async def receipt(
        self, request: Request[Any, Any, Any], receipts: ReceiptService, request_id: RequestId, wait_s: Wait = 0.0
    ) -> Response[bytes]:
        return _json(await receipts.wait_own(request_id, principal_of(request).key_id, wait_s=wait_s))

    @get(
        "/load",
        summary="Get the progress of a model's load; null if the model is not being loaded",
        media_type="application/json",
    )
    async def load(
        self,
        request: Request[Any, Any, Any],
        loads: LoadService,
        models: Models,
        model: ModelName,
        since: Since = 0,
        wait_s: Wait = 0.0,
    ) -> Response[bytes]:
        if not principal_of(request).may_use(model):
            return _json(None)
        found = await loads.wait(await models.meant(model), since=since, wait_s=wait_s, current=True)
        return _json(None if found is None or found.state == LoadState.LOADED else found)


def _json(found: object) -> Response[bytes]:
    return Response(encode(found), media_type="application/json")


ROUTES: tuple[Any, ...] = (PlaygroundRoutes,)
