"""Writes docs/reference/http.md from the API's own description; a test holds the page to the code.

.venv/bin/python scripts/_http_reference.py
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from litestar.exceptions import LitestarDeprecationWarning

from corral.controller.access.gateway_trust import GatewayTrust
from corral.controller.web.reference import Operation, Words, read_reference, roles_needed
from corral.controller.wiring.app import build_app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "http.md"
HEAD = """# The HTTP API of the controller

A running fleet shows the same at `/docs`, with every shape and a line of `curl` for each call, and as OpenAPI at
`/openapi.json`. Send an API key as `Authorization: Bearer ck_…`. An admin may do whatever a viewer may. A node is named
by its id or its name. `/v1/…`, the OpenAI API, is the gateway's and not listed here.

Errors are `{"error": {"code": <status>, "message": …, "type": …}}`; under `/api/nodes` and `/api/node` the type is
always `node_error`. Under `/api/operations` and `/api/backends` they are `{"error": <message>, "code": <type>}`. A
build for one kind of machine that is asked for everywhere is 409 with `"code": "concrete_backend_requires_target"` and
`meta_alternative`, the name to ask for instead.

Whatever installs, upgrades, rolls back or deletes is accepted at once and answers with an id; follow it at
`/api/operations/{job_id}` or its `/events`. With `?plan=true` nothing is stored: the answer tells what would happen on
each node. Where a call answers only when all is done, it answers 202 with the id when that takes more than a minute.

`/api/events` is a stream of server-sent events: `node` and `operation` with the whole view, `node-removed` and
`operation-removed` with the id, `changed` with a kind; first the present state, then `ready`. A follower is told of
operations at most four times a second; with `?rows=false` without their nodes.

This page is written by `scripts/_http_reference.py`.
"""
# Doors ask for services by these names; what they are does not matter to the description.
SERVICES = (
    "access",
    "ingress_tokens",
    "effective_settings",
    "catalogue",
    "controller_metrics",
    "sign_in_service",
    "shared_parts",
    "artifacts",
    "releases",
    "fetches",
    "fits",
    "planner",
    "uploads",
    "upload_operations",
    "bundles",
    "packages",
    "stages",
    "locations",
    "cleanup",
    "fleet_files",
    "gallery_status",
    "ingresses",
    "installed",
    "integrity",
    "join_tokens",
    "models",
    "blob_peers",
    "node_api",
    "nodes",
    "operations",
    "rollouts",
    "overview",
    "preparing",
    "readiness",
    "receipts",
    "running",
    "samples",
    "schedules",
    "loads",
    "replica_rows",
    "explaining",
    "trials",
    "upgrades",
    "views",
    "feed",
)


def render() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LitestarDeprecationWarning)
        nobody: Any = None
        app = build_app(dict.fromkeys(SERVICES), access_service=nobody, trust=GatewayTrust(None))
    sections, _ = read_reference(app.openapi_schema.to_schema(), roles_needed(app.routes), "")
    return HEAD + "".join(part for section in sections for part in _section(section.name, section.operations))


def _section(name: str, operations: tuple[Operation, ...]) -> Iterator[str]:
    yield f"\n## {name[0].upper()}{name[1:]}\n\n| call | who may | what | takes | answers |\n|---|---|---|---|---|\n"
    # As a person looks for them: what belongs to one thing together, reading before changing.
    for operation in sorted(operations, key=lambda each: (each.path, each.method != "GET", each.method)):
        cells = (
            f"`{operation.method} {operation.path}`",
            operation.role,
            operation.summary,
            _takes(operation),
            "; ".join(f"{answer.status} {_text(answer.words)}" for answer in operation.answers),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _takes(operation: Operation) -> str:
    query = [f"`?{parameter.name}`" for parameter in operation.parameters if parameter.place == "query"]
    return ", ".join([*([_text(operation.body)] if operation.body else []), *query])


def _text(words: Words) -> str:
    return "".join(word.text for word in words)


if __name__ == "__main__":
    PAGE.write_text(render())
