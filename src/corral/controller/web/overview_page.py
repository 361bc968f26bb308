"""`/`: the start page. Charts of what the fleet does, what needs a person, what goes on, the last requests."""

from __future__ import annotations

from typing import Annotated

from litestar import get
from litestar.di import Provide
from litestar.params import QueryParameter

from corral.controller.api.auth import viewers
from corral.controller.api.overview import Overview
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.replicas.listing import ReplicaListing
from corral.controller.samples.series import RANGES
from corral.controller.samples.service import SampleService
from corral.controller.web.attention import attention_of
from corral.controller.web.charts import OF_FLEET, charts_of, range_links
from corral.controller.web.navigation import OVERVIEW
from corral.controller.web.operations import lines_of
from corral.controller.web.page_context import Page, PageContext, Shown
from corral.controller.web.placement_map import placement_map
from corral.controller.web.requests import request_lines
from corral.controller.web.shared_parts import SharedParts

_REQUESTS_SHOWN = 8
Span = Annotated[str, QueryParameter(name="range", max_length=5)]


class OverviewReader:
    """What the start page is made of."""

    def __init__(
        self,
        context: PageContext,
        overview: Overview,
        receipts: ReceiptService,
        samples: SampleService,
        replica_rows: ReplicaListing,
        span: str,
    ) -> None:
        self._context = context
        self._overview = overview
        self._receipts = receipts
        self._samples = samples
        self._replicas = replica_rows
        self.span = span

    async def fill(self) -> Shown:
        now = self._context.now()
        cluster, nodes = await self._overview.read_with_nodes()
        running, total = await self._context.running()
        latest = await self._receipts.list_views(
            limit=_REQUESTS_SHOWN, failed=False, model="", key="", node="", since=None, before=""
        )
        series = await self._samples.series("fleet", "", self.span)
        return {
            "cluster": cluster,
            "attention": attention_of(nodes, cluster.notices, now),
            "ranges": range_links(self.span),
            "charts": charts_of(OF_FLEET, series, self.span),
            "map": placement_map(nodes, await self._replicas.desired()),
            "running": lines_of(running, now, {}),
            "running_more": total - len(running),
            "latest": request_lines(latest.requests, now),
        }


@get(OVERVIEW)
async def overview_page(context: PageContext, overview_reader: OverviewReader) -> Page:
    part = f"/page/overview?range={overview_reader.span}"
    return await context.page("overview.html", OVERVIEW, part, overview_reader.fill)


@get("/page/overview", guards=[viewers])
async def overview_part(context: PageContext, overview_reader: OverviewReader, shared_parts: SharedParts) -> Page:
    return await context.shared_part(shared_parts, "overview_part.html", overview_reader.span, overview_reader.fill)


async def _overview_reader(
    context: PageContext,
    overview: Overview,
    receipts: ReceiptService,
    samples: SampleService,
    replica_rows: ReplicaListing,
    span: Span = "1h",
) -> OverviewReader:
    return OverviewReader(context, overview, receipts, samples, replica_rows, known_range(span))


def known_range(span: str) -> str:
    return span if span in RANGES else "1h"


PAGES = (overview_page,)
PARTS = (overview_part,)
DEPENDENCIES = {"overview_reader": Provide(_overview_reader)}
