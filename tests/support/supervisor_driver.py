"""A worker in miniature: holds a supervisor, adopts, starts what it is given, says so, and waits to be killed.

`python -m tests.support.supervisor_driver FOLDER SPEC.json…`; prints one JSON line when everything runs. SIGTERM stops
all and leaves.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import uvloop

from corral.contract.codec import decode
from corral.worker.supervisor.spec import ProcessSpec
from tests.support.supervising import make_supervisor


async def main() -> None:
    folder, *specs = map(Path, sys.argv[1:])
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with make_supervisor(folder) as supervisor:
        adopted = await supervisor.adopt()
        started = [await supervisor.start(decode(ProcessSpec, path.read_bytes())) for path in specs]
        told = {
            "adopted": [running.process_id for running in adopted],
            "started": [{"process_id": each.process_id, "port": each.port, "pid": each.pid} for each in started],
        }
        print(json.dumps(told), flush=True)
        await stopped.wait()
        await supervisor.stop_all(closing=True)


if __name__ == "__main__":
    uvloop.run(main())
