"""Completes names of nodes, models and operations for shells, from the fleet that the command line means.

A shell waits for the answer while a person types: what takes longer than a moment, or fails, completes nothing.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from corral.kit.errors import CorralError

if TYPE_CHECKING:
    import click

    from corral.client import Client

_TIMEOUT_S = 2.0
_ID_LENGTH = 8  # of an operation; the beginning of an id is enough
NODES, MODELS, OPERATIONS = "NODE", "MODEL", "OPERATION"


def complete_name(kind: str, context: click.Context) -> list[str]:
    given = {name: context.params.get(name) for name in ("url", "key", "ca", "context")}
    given["context"] = given["context"] or context.find_root().params.get("fleet")
    try:
        return sorted(asyncio.run(_names(kind, given)))
    except (CorralError, OSError, TimeoutError):
        return []


async def _names(kind: str, given: dict[str, str | None]) -> list[str]:
    from corral.client import Client, find_endpoint

    endpoint = find_endpoint(**given, env=os.environ)
    async with asyncio.timeout(_TIMEOUT_S), Client(endpoint, timeout_s=_TIMEOUT_S, restart_s=0.0) as client:
        return await _read(kind, client)


async def _read(kind: str, client: Client) -> list[str]:
    if kind == NODES:
        return [node.name for node in await client.nodes.list()]
    if kind == MODELS:
        return [model.id for model in await client.models.list()]
    return [each.job_id[:_ID_LENGTH] for each in await client.operations.list(rows=False)]
