"""Completes names of nodes, models and operations for shells, from the fleet that the command line means.

A shell waits for the answer while a person types: what takes longer than a moment, or fails, completes nothing.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from corral.cli import lists
from corral.client.endpoint import find_endpoint
from corral.kit.ca_pin import is_pin
from corral.kit.errors import CorralError

if TYPE_CHECKING:
    import click

    from corral.client import Endpoint

_TIMEOUT_S = 2.0
_ID_LENGTH = 8  # of an operation; the beginning of an id is enough
NODES, MODELS, OPERATIONS = "NODE", "MODEL", "OPERATION"


def complete_name(kind: str, context: click.Context) -> list[str]:
    given = {name: context.params.get(name) for name in ("url", "key", "ca", "context")}
    given["context"] = given["context"] or context.find_root().params.get("fleet")
    try:
        return sorted(_names(kind, find_endpoint(**given, env=os.environ)))
    except (CorralError, OSError):
        return []


def _names(kind: str, endpoint: Endpoint) -> list[str]:
    if is_pin(endpoint.ca):  # the CA has to be fetched first
        import asyncio

        return asyncio.run(_names_with_client(kind, endpoint))
    if kind == NODES:
        return [node.name for node in _read(endpoint, lists.NODES)]
    if kind == MODELS:
        return [model.id for model in _read(endpoint, lists.MODELS)]
    return [each.job_id[:_ID_LENGTH] for each in _read(endpoint, lists.OPERATION_COUNTS)]


def _read(endpoint: Endpoint, chosen: lists.List) -> list[Any]:
    return lists.read_rows(endpoint, chosen, SimpleNamespace, timeout_s=_TIMEOUT_S) or []


async def _names_with_client(kind: str, endpoint: Endpoint) -> list[str]:
    import asyncio

    from corral.client import Client

    async with asyncio.timeout(_TIMEOUT_S), Client(endpoint, timeout_s=_TIMEOUT_S, restart_s=0.0) as client:
        if kind == NODES:
            return [node.name for node in await client.nodes.list()]
        if kind == MODELS:
            return [model.id for model in await client.models.list()]
        return [each.job_id[:_ID_LENGTH] for each in await client.operations.list(rows=False)]
