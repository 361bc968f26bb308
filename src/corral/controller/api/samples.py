"""`/api/samples`: how the fleet, a model or a node did over time."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import get
from litestar.params import Parameter, QueryParameter

from corral.contract.samples import SampleSeries
from corral.controller.api.auth import viewers
from corral.controller.samples.service import SampleService

Kind = Annotated[str, Parameter(max_length=10, description="`fleet`, `model` or `node`")]
Name = Annotated[str, Parameter(max_length=255, description="Of the model or the node; none for the fleet")]
Span = Annotated[str, QueryParameter(name="range", max_length=5, description="`1h`, `6h`, `24h`, `7d` or `30d`")]


@get(
    "/api/samples",
    guards=[viewers],
    tags=["requests"],
    summary="Read requests, tokens, times and queues of the fleet or a model, or the memory of a node, over time",
)
async def read_samples(
    samples: SampleService, span: Span = "1h", kind: Kind = "fleet", name: Name = ""
) -> SampleSeries:
    return await samples.series(kind, name, span)


ROUTES: tuple[Any, ...] = (read_samples,)
