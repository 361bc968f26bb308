"""Tell the server which users no longer count: push the account's token, revocations inside, to its resolver.

Level-triggered: the token is built whole from what SQL says, and callers push it at every change and after every
reconnect. Pushing twice, or from several controllers, is harmless. The server drops a revoked user at once, keeps the
token in its folder and refuses the user also after a restart.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence

from corral.bus.api import BusCredentials, BusTls
from corral.bus.auth import SYSTEM
from corral.bus.core import Registration
from corral.bus.lanes import Delivery, Direct
from corral.bus.link import Link, LinkTimes, open_link
from corral.bus.permissions import inbox_prefix
from corral.kit.errors import Failed, OutcomeUnknown, Unavailable, Unreachable

_UPDATE = "$SYS.REQ.CLAIMS.UPDATE"
_LOOKUP = "$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP"


async def push_account(
    urls: Sequence[str],
    system: BusCredentials,
    account_jwt: str,
    *,
    tls: BusTls | None = None,
    timeout_s: float = 5.0,
    inbox: str = inbox_prefix(SYSTEM),
) -> None:
    """Returns once a server has taken the token. `Failed` says why one refused it; `Unavailable`, `Unreachable` (no
    server with such a resolver) and `OutcomeUnknown` mean: try again later."""
    answer = await _ask_server(urls, system, _UPDATE, account_jwt.encode(), tls, timeout_s, inbox)
    try:
        said = json.loads(answer)
        refused = said.get("error")
        taken = said.get("data", {}).get("code") == 200
    except (ValueError, AttributeError) as error:
        raise Failed("the bus server answered something else than a report on the account") from error
    if refused or not taken:
        why = (refused or {}).get("description") or said
        raise Failed(f"the bus server refuses the account: {why}")


async def look_up_account(
    urls: Sequence[str],
    system: BusCredentials,
    account: str,
    *,
    tls: BusTls | None = None,
    timeout_s: float = 5.0,
    inbox: str = inbox_prefix(SYSTEM),
) -> str:
    """The account's token as the server has it: what to revise on a NATS whose accounts are not ours alone."""
    subject = _LOOKUP.format(account=account)
    answer = (await _ask_server(urls, system, subject, b"", tls, timeout_s, inbox)).decode()
    if not answer:
        raise Failed(f"the bus server knows no account {account}")
    return answer


async def _ask_server(
    urls: Sequence[str],
    system: BusCredentials,
    subject: str,
    payload: bytes,
    tls: BusTls | None,
    timeout_s: float,
    inbox: str,
) -> bytes:
    """One question on a connection of its own: revoking is rare, and the system account is nobody's daily user."""
    link = await _open_any(urls, system, tls, timeout_s)
    answered: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()

    def take(delivery: Delivery) -> None:
        if not answered.done():  # in a cluster every server answers
            answered.set_result(delivery)

    reply = f"{inbox}.{secrets.token_hex(8)}"
    try:
        async with asyncio.timeout(timeout_s):
            await link.add(Registration(reply, "", Direct(take)), "")
            await link.barrier()
            await link.send(subject, payload, reply)
            delivery = await answered
    except TimeoutError as error:
        raise OutcomeUnknown(f"the bus server did not answer on {subject} within {timeout_s:g} s") from error
    finally:
        await link.close()
    if delivery.unanswerable:
        raise Unreachable("the bus server takes no accounts at run time (no full resolver)")
    return delivery.payload


async def _open_any(urls: Sequence[str], system: BusCredentials, tls: BusTls | None, timeout_s: float) -> Link:
    failures: list[str] = []
    times = LinkTimes(connect_timeout_s=timeout_s, ping_timeout_s=timeout_s)
    for url in urls:
        try:
            return await open_link(url, system, tls=tls, name="corral revocation", times=times)
        except Unavailable as error:
            failures.append(error.message)
    raise Unavailable("; ".join(failures) or "no bus URL given")
