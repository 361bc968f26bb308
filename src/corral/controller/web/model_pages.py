"""`/fleet/models`, and the parts of it that its script fetches: models with their replicas, why a model is where it is,
where its files are, its definition as text. They read what the admin API reads, and fill a page."""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get
from litestar.di import Provide
from litestar.params import Parameter

from corral.contract.codec import Message, encode
from corral.contract.why import DECISIONS, said_once
from corral.controller.api.auth import viewers
from corral.controller.backends.gallery_status import MODELS as MODEL_GALLERIES
from corral.controller.backends.gallery_status import GalleryStatus
from corral.controller.models.service import Models
from corral.controller.operations.service import Operations
from corral.controller.replicas.listing import ReplicaListing
from corral.controller.replicas.loads import LoadService
from corral.controller.replicas.why import PlacementExplainer
from corral.controller.staging.locations import FileLocations
from corral.controller.web.list_filter import ListFilter
from corral.controller.web.model_files import files_table
from corral.controller.web.models import catalogue_of
from corral.controller.web.navigation import MODELS
from corral.controller.web.page_context import Page, PageContext, Shown
from corral.controller.web.pages import SAFE_HEADERS, load_pages
from corral.controller.web.sign_in import AnyRequest
from corral.controller.web.words import size
from corral.kit.humanize import to_yaml

_NODES_SHOWN = 100  # in the dialog that says why; best first
Name = Annotated[str, Parameter(max_length=255)]


class Written(Message, frozen=True, omit_defaults=False):
    """A model's definition for the field it is edited in."""

    text: str
    row_version: int
    file: str  # that defines it, and is to be changed instead


class Cataloguing:
    """What the list of models is made of."""

    def __init__(
        self,
        models: Models,
        loads: LoadService,
        replica_rows: ReplicaListing,
        gallery_status: GalleryStatus,
        context: PageContext,
        filters: ListFilter,
    ) -> None:
        self._models = models
        self._galleries = gallery_status
        self._loads = loads
        self._rows = replica_rows
        self._context = context
        self.filters = filters

    async def fill(self) -> Shown:
        views, loads = await self._models.list_views(), await self._loads.list_(past=True)
        catalogue = catalogue_of(views, loads, await self._rows.list_(), self.filters, self._context.now())
        return {"catalogue": catalogue, "notices": self._galleries.notices(MODEL_GALLERIES)}


@get(MODELS)
async def models_page(request: AnyRequest, context: PageContext, cataloguing: Cataloguing) -> Page:
    trust, host = request.app.state.trust, request.headers.get("host", "")

    async def fill() -> Shown:
        return {**await cataloguing.fill(), "ca": await trust.pin(f"https://{host}")}

    return await context.page("models.html", MODELS, f"/page/models{cataloguing.filters.query()}", fill)


@get("/page/models", guards=[viewers])
async def models_part(context: PageContext, cataloguing: Cataloguing) -> Page:
    return await context.part("models_part.html", cataloguing.fill)


@get("/page/why", guards=[viewers])
async def why_part(models: Models, explaining: PlacementExplainer, model: Name) -> Page:
    """Of what an alias stands for: that is what has replicas."""
    explained = await explaining.model(await models.meant(model))
    decision = DECISIONS.get(explained.decision, explained.decision)
    shown: Shown = {"why": explained, "decision": decision, "said_once": said_once, "size": size, "most": _NODES_SHOWN}
    return load_pages().page("why_part.html", **shown)


@get("/page/files", guards=[viewers])
async def files_part(models: Models, locations: FileLocations, operations: Operations, model: Name) -> Page:
    """Of what an alias stands for. Nodes are queried now."""
    view = await locations.view(await models.meant(model))
    return load_pages().page("files_part.html", table=files_table(view, await operations.list_views(loads=True)))


@get("/page/definition", guards=[viewers])
async def definition_part(models: Models, model: Name) -> Response[bytes]:
    view = await models.view(model)
    file = view.source.partition("/")[2] if view.origin == "file" else ""
    written = Written(to_yaml(view.definition), view.row_version, file)
    headers = {**SAFE_HEADERS, "Cache-Control": "no-store"}
    return Response(encode(written), media_type="application/json", headers=headers)


async def _cataloguing(
    models: Models,
    loads: LoadService,
    replica_rows: ReplicaListing,
    gallery_status: GalleryStatus,
    context: PageContext,
    filters: ListFilter,
) -> Cataloguing:
    return Cataloguing(models, loads, replica_rows, gallery_status, context, filters)


PAGES = (models_page,)
PARTS = (models_part, why_part, files_part, definition_part)
DEPENDENCIES = {"cataloguing": Provide(_cataloguing)}
