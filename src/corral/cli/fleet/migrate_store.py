"""`corral migrate-store`: copies the database of a stopped fleet to PostgreSQL. `corral.store` does the copying."""

from __future__ import annotations

import asyncio
from typing import Annotated

from corral.cli.common import declare
from corral.cli.common.data_folder import block_start, data_folder
from corral.cli.common.options import Data, Json
from corral.cli.common.output import DONE, OnTableProgress, print_json, print_line, print_note, table_progress
from corral.cli.common.roles import copy_store, live_controllers
from corral.kit.errors import Conflict

app = declare.App()
_ALIVE_WITHIN_S = 30.0


@app.command("migrate-store")
def migrate_store(
    to: Annotated[
        str,
        declare.Option("--to", metavar="URL", help="target: postgresql://USER@HOST/NAME, an empty database"),
    ],
    source: Annotated[
        str | None,
        declare.Option("--from", metavar="URL", help="source; without it, the SQLite database of the data folder"),
    ] = None,
    data: Data = None,
    as_json: Json = False,
) -> int:
    """Copy the database of a stopped fleet to PostgreSQL.

    The copy is verified. The source is not changed.

    Give the password in PGPASSWORD or ~/.pgpass: other users of this machine can read a password in the URL.

    \b
    Examples:
      corral migrate-store --to postgresql://corral@db/corral
      CORRAL_STORE=postgresql://corral@db/corral corral up        (afterwards)
    """
    folder = data_folder(data)
    origin = source or f"sqlite:///{folder.database}"
    with block_start(folder), table_progress(quiet=as_json) as on_progress:
        copied = asyncio.run(_copy(origin, to, on_progress))
    if as_json:
        print_json([{"table": table, "rows": rows} for table, rows in copied])
        return DONE
    print_line(f"{sum(rows for _, rows in copied)} rows in {len(copied)} tables copied and verified.")
    print_note("Start the fleet with the new database: `CORRAL_STORE=postgresql://… corral up`")
    return DONE


async def _copy(origin: str, target: str, on_progress: OnTableProgress) -> list[tuple[str, int]]:
    alive = await live_controllers(origin, within_s=_ALIVE_WITHIN_S)
    if alive:
        raise Conflict(
            f"a controller on {', '.join(alive)} used this database less than {_ALIVE_WITHIN_S:.0f} s ago: "
            "stop every controller, wait 30 s and run this command again"
        )
    return await copy_store(origin, target, on_progress)
