"""One request to a process that is to take over from another (docs/explanation/design.md#upgrades): some break only
when they are first asked."""

from __future__ import annotations

import aiohttp

from corral.contract.manifest import OPENAI
from corral.kit.errors import Failed
from corral.worker.supervisor.table import Running

# Not a failure of the process: it does something else than chat, or is asked by others already.
_FINE = (501, 503)


async def probe_once(running: Running, timeout_s: float) -> None:
    """Raises Failed when it breaks off, breaks down or does not answer. What it answers does not matter: not every
    model can chat. A gRPC process has answered LoadModel, and one without a model has nothing to be asked."""
    if running.protocol != OPENAI or not running.model:
        return
    body = {"model": running.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {running.token}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.post(f"http://{running.address}/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            await answer.read()
            status = answer.status
    except TimeoutError as error:
        raise Failed(f"the new process of {running.key} did not answer within {timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise Failed(f"the new process of {running.key} broke off when it was first asked: {error}") from error
    if status >= 500 and status not in _FINE:
        raise Failed(f"the new process of {running.key} answered {status} when it was first asked")
