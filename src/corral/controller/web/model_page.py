"""`/models/NAME`: one model, and the part of it that its script fetches. Names may have slashes."""

from __future__ import annotations

from typing import Annotated

from litestar import get
from litestar.di import Provide
from litestar.params import Parameter

from corral.controller.api.auth import viewers
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.models.service import Models
from corral.controller.replicas.listing import ReplicaListing
from corral.controller.replicas.loads import LoadService
from corral.controller.samples.service import SampleService
from corral.controller.web.charts import OF_FLEET, charts_of, range_links
from corral.controller.web.model_details import revision_lines, snippets
from corral.controller.web.models import line_of
from corral.controller.web.navigation import MODELS
from corral.controller.web.overview_page import Span, known_range
from corral.controller.web.page_context import Gone, Page, PageContext, Shown
from corral.controller.web.requests import request_lines
from corral.controller.web.words import model_href
from corral.kit.humanize import to_yaml

Name = Annotated[str, Parameter(max_length=255)]
_REQUESTS_SHOWN = 8


class ModelReader:
    """What the page of a model is made of."""

    def __init__(
        self,
        context: PageContext,
        models: Models,
        loads: LoadService,
        replica_rows: ReplicaListing,
        receipts: ReceiptService,
        samples: SampleService,
        span: str,
    ) -> None:
        self._context = context
        self._models = models
        self._loads = loads
        self._replicas = replica_rows
        self._receipts = receipts
        self._samples = samples
        self.span = span

    async def fill(self, name: str) -> Shown:
        now = self._context.now()
        model = await self._models.view(name)
        loads = {load.model: load for load in await self._loads.list_(past=True)}
        rows = await self._replicas.list_(model=model.id)
        latest = await self._receipts.list_views(
            limit=_REQUESTS_SHOWN, failed=False, model=model.id, key="", node="", since=None, before=""
        )
        series = await self._samples.series("model", model.id, self.span)
        return {
            "model": model,
            "line": line_of(model, loads.get(model.id), rows, now),
            "definition": to_yaml(model.definition),
            "revisions": revision_lines(await self._models.list_revisions(model.id), now),
            "latest": request_lines(latest.requests, now),
            "snippets": snippets(model.id, self._context.base_url()),
            "ranges": range_links(self.span),
            "charts": charts_of(OF_FLEET, series, self.span),
            "address": model_href(model.id),
        }


@get("/models/{name:path}")
async def model_page(context: PageContext, model_reader: ModelReader, name: Name) -> Page:
    model = name.removeprefix("/")
    part = f"/page/model{model_href(model).removeprefix('/models')}?range={model_reader.span}"
    return await context.page("model.html", MODELS, part, lambda: model_reader.fill(model), gone=Gone("model", model))


@get("/page/model/{name:path}", guards=[viewers])
async def model_part(context: PageContext, model_reader: ModelReader, name: Name) -> Page:
    return await context.part("model_part.html", lambda: model_reader.fill(name.removeprefix("/")))


async def _model_reader(
    context: PageContext,
    models: Models,
    loads: LoadService,
    replica_rows: ReplicaListing,
    receipts: ReceiptService,
    samples: SampleService,
    span: Span = "1h",
) -> ModelReader:
    return ModelReader(context, models, loads, replica_rows, receipts, samples, known_range(span))


PAGES = (model_page,)
PARTS = (model_part,)
DEPENDENCIES = {"model_reader": Provide(_model_reader)}
