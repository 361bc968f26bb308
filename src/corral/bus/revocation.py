"""Revoke users: push the account's token, with the revocations in it, to the server's resolver.

Level-triggered: the whole token is built from the database, and callers push it at every change and after every
reconnect. Pushing twice, or from several controllers, is harmless. The server disconnects a revoked user at once,
keeps the token in its folder and refuses the user also after a restart.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence

from corral.bus.api import BusCredentials, BusTls
from corral.bus.auth import SYSTEM
from corral.bus.connection import ConnectionTimeouts, NatsConnection, open_connection
from corral.bus.core import Registration
from corral.bus.handler_queue import Delivery, DirectSink
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
    """Return once a server has accepted the token. Raises `Failed` with the reason of a refusal; after `Unavailable`,
    `Unreachable` (no server with such a resolver) and `OutcomeUnknown` the caller tries again later."""
    answer = await _request_server(urls, system, _UPDATE, account_jwt.encode(), tls, timeout_s, inbox)
    try:
        report = json.loads(answer)
        refused = report.get("error")
        taken = report.get("data", {}).get("code") == 200
    except (ValueError, AttributeError) as error:
        raise Failed("the bus server's reply is not a report on the account") from error
    if refused or not taken:
        why = (refused or {}).get("description") or report
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
    """The account's token as the server has it, to be revised on a NATS server whose accounts others use too."""
    subject = _LOOKUP.format(account=account)
    answer = (await _request_server(urls, system, subject, b"", tls, timeout_s, inbox)).decode()
    if not answer:
        raise Failed(f"the bus server knows no account {account}")
    return answer


async def _request_server(
    urls: Sequence[str],
    system: BusCredentials,
    subject: str,
    payload: bytes,
    tls: BusTls | None,
    timeout_s: float,
    inbox: str,
) -> bytes:
    """One request on a connection of its own: revocations are rare."""
    connection = await _open_any(urls, system, tls, timeout_s)
    answered: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()

    def take(delivery: Delivery) -> None:
        if not answered.done():  # in a cluster every server answers
            answered.set_result(delivery)

    reply = f"{inbox}.{secrets.token_hex(8)}"
    try:
        async with asyncio.timeout(timeout_s):
            await connection.add(Registration(reply, "", DirectSink(take)), "")
            await connection.barrier()
            await connection.send(subject, payload, reply)
            delivery = await answered
    except TimeoutError as error:
        raise OutcomeUnknown(f"the bus server did not answer on {subject} within {timeout_s:g} s") from error
    finally:
        await connection.close()
    if delivery.has_no_responders:
        raise Unreachable("the bus server accepts no accounts at run time (it has no full resolver)")
    return delivery.payload


async def _open_any(
    urls: Sequence[str], system: BusCredentials, tls: BusTls | None, timeout_s: float
) -> NatsConnection:
    failures: list[str] = []
    times = ConnectionTimeouts(connect_timeout_s=timeout_s, ping_timeout_s=timeout_s)
    for url in urls:
        try:
            return await open_connection(url, system, tls=tls, name="corral revocation", times=times)
        except Unavailable as error:
            failures.append(error.message)
    raise Unavailable("; ".join(failures) or "no bus URL given")
