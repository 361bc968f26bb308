"""`corral` alone: the state of the fleet, and the next useful command."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

from corral.cli.common.output import DONE, FAILED, key_value_lines, print_error, print_line, printable
from corral.cli.lists import MODELS, NODES, OPERATION_COUNTS, read_rows
from corral.kit.errors import CorralError

if TYPE_CHECKING:
    from corral.client import Endpoint
    from corral.contract.admin import NodeView, OperationView
    from corral.contract.catalogue import ModelView

_TIMEOUT_S = 10.0
_START = (
    "No fleet runs on this machine.",
    "",
    "  corral up                  start one",
    "  corral up --lan            start one that other machines can join",
    "  corral join URL --token T  join another machine's; `corral token create` there prints the whole command",
    "",
    "CORRAL_URL and CORRAL_KEY say where another fleet is. All commands: corral --help",
)
_OPEN = ("healthy", "draining", "unhealthy")  # states in which a node holds replicas


def show_overview(context: str | None) -> int:
    from corral.client.contexts import choose_context
    from corral.client.endpoint import find_endpoint

    if not os.environ.get("CORRAL_URL") and choose_context(os.environ, context) is None:
        for line in _START:
            print_line(line)
        return DONE
    endpoint = find_endpoint(context=context, env=os.environ)
    try:
        nodes, models, operations = _read(endpoint)
    except CorralError as error:
        print_error(error.message)
        print_line("Next: corral doctor")
        return FAILED
    for line in overview_lines(endpoint.url, nodes, models, operations):
        print_line(line)
    print_line(f"\nNext: {printable(next_command(nodes, models, operations))}")
    return DONE


def _read(endpoint: Endpoint) -> tuple[Sequence[NodeView], Sequence[ModelView], Sequence[OperationView]]:
    found = []
    for each in (NODES, MODELS, OPERATION_COUNTS):
        rows = read_rows(endpoint, each, SimpleNamespace)
        if rows is None:
            return _read_with_client(endpoint)
        found.append(rows)
    nodes, models, operations = found
    return nodes, models, operations


def _read_with_client(
    endpoint: Endpoint,
) -> tuple[Sequence[NodeView], Sequence[ModelView], Sequence[OperationView]]:
    import asyncio

    from corral.client import Client

    async def read() -> tuple[Sequence[NodeView], Sequence[ModelView], Sequence[OperationView]]:
        async with Client(endpoint, timeout_s=_TIMEOUT_S, restart_s=0.0) as client:
            return await asyncio.gather(client.nodes.list(), client.models.list(), client.operations.list(rows=False))

    return asyncio.run(read())


def overview_lines(
    url: str, nodes: Sequence[NodeView], models: Sequence[ModelView], operations: Sequence[OperationView]
) -> Iterator[str]:
    """Pure."""
    ready = sum(1 for model in models if model.ready)
    yield from key_value_lines(
        (
            ("fleet", url),
            ("nodes", _counted(node.status for node in nodes) or "none"),
            ("models", f"{len(models)} installed, {ready} ready" if models else "none"),
            ("operations", f"{len(operations)} open" if operations else "none open"),
        )
    )


def next_command(nodes: Sequence[NodeView], models: Sequence[ModelView], operations: Sequence[OperationView]) -> str:
    """What helps most now. Pure."""
    pending = [node.name for node in nodes if node.status == "pending"]
    if pending:
        return f"corral nodes approve {pending[0]}"
    if not nodes:
        return "corral token create                  (prints the command with which a machine joins)"
    if not any(node.status in _OPEN for node in nodes) or any(node.status == "unhealthy" for node in nodes):
        return "corral doctor                        (finds problems and shows how to fix them)"
    if operations:
        return "corral ops watch                     (shows the progress of what runs)"
    if not models:
        return 'corral chat smollm2-135m "Hello"     (installs a small model and asks it)'
    usable = [model.id for model in models if not model.disabled]
    return f'corral chat {max(models, key=lambda model: (model.id in usable, model.ready)).id} "Hello"'


def _counted(states: Iterator[str]) -> str:
    return ", ".join(f"{number} {state}" for state, number in Counter(states).most_common())
