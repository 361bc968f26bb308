"""Verifies installed backends on their nodes in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from corral.cli.common.options import unknown_name
from corral.cli.common.output import DONE, FAILED, print_error
from corral.kit.errors import CorralError, NotFound

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.admin import BackendVerified

MAX_PARALLEL_NODES = 16  # that read their disks at the same time because of one command


async def verify_on_nodes(client: Client, names: Sequence[str], node: str) -> tuple[list[BackendVerified], int]:
    """Verify on all nodes in parallel. A node that does not answer does not stop the rest."""
    matrix = await client.backends.matrix()
    node_names = {each.id: each.name for each in matrix.nodes}
    chosen = (await client.nodes.get(node)).id if node else ""
    there = {row.backend: [id for id, cell in row.nodes.items() if cell.installed] for row in matrix.backends}
    targets: list[tuple[str, str]] = []
    for name in names:
        where = [id for id in there.get(name, ()) if not chosen or id == chosen]
        if not where:
            raise NotFound(unknown_name("backend", name, sorted(there), none="no backend is installed"))
        targets += [(id, name) for id in where]
    limit = asyncio.Semaphore(MAX_PARALLEL_NODES)

    async def ask(node_id: str, backend: str) -> BackendVerified | None:
        async with limit:
            try:
                return await client.backends.verify(node_id, backend)
            except CorralError as error:
                print_error(f"{node_names.get(node_id, node_id)}: {error.message}")
                return None

    answers = await asyncio.gather(*(ask(*each) for each in targets))
    return [each for each in answers if each is not None], DONE if all(answers) else FAILED
