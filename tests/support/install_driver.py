"""A process that installs one backend, and that kills itself with -9 as soon as it is told to be in some phase: whoever
read of it and killed it from outside might come when all is over.

python -m tests.support.install_driver FOLDER [PHASE LEAST_BYTES]   (the request, as JSON, on its input)
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from corral.blobs.progress import Progress
from corral.blobs.sources.python_environment import WheelTools
from corral.contract.codec import decode
from corral.kit.log import configure_logging
from corral.worker.installer.requests import InstallRequest
from tests.support.installing import open_installer, open_source_context


async def main() -> None:
    configure_logging(role="driver", level="critical")
    folder, request = Path(sys.argv[1]), decode(InstallRequest, sys.stdin.buffer.read())
    phase, least_bytes = (sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 2 else ("", 0)

    def heard(progress: Progress) -> None:
        if progress.phase.value == phase and progress.current_bytes >= least_bytes:
            os.kill(os.getpid(), signal.SIGKILL)

    tools = WheelTools(env=dict(os.environ), timeout_s=50)
    async with open_source_context(folder, tools=tools) as means, open_installer(folder, means=means) as (installer, _):
        await installer.install(request, heard)


if __name__ == "__main__":
    asyncio.run(main())
