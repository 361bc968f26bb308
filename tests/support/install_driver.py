"""A process that installs one backend and says how far it is, to be killed by a test.

python -m tests.support.install_driver FOLDER   (the request, as JSON, on its input)
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from corral.blobs.progress import Progress
from corral.blobs.wheels import WheelTools
from corral.contract.codec import decode
from corral.kit.log import configure_logging
from corral.worker.installer.requests import InstallRequest
from tests.support.installing import open_installer, open_means


def say(progress: Progress) -> None:
    print(progress.phase.value, progress.current_bytes, flush=True)


async def main() -> None:
    configure_logging(role="driver", level="critical")
    folder, request = Path(sys.argv[1]), decode(InstallRequest, sys.stdin.buffer.read())
    tools = WheelTools(env=dict(os.environ), timeout_s=50)
    async with open_means(folder, tools=tools) as means, open_installer(folder, means=means) as (installer, _):
        await installer.install(request, say)
    print("installed", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
