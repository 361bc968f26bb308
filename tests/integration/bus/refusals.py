"""Why a bus does not come about, once it has been tried: how long a try takes is the machine's affair."""

from __future__ import annotations

from corral.bus.nats import NatsBus
from corral.kit.errors import Unavailable
from tests.support.waiting import until

_LOOK_S = 0.1


async def refused_for(bus: NatsBus, reason: str = "") -> str:
    """What `wait_connected` says, as soon as it gives this reason, or any. Whoever is let in has not been refused."""
    told: list[str] = []

    async def says_so() -> bool:
        try:
            await bus.wait_connected(_LOOK_S)
        except Unavailable as error:
            told.append(error.message)
        else:
            told.append("connected")
        tried = "not connected yet" not in told[-1]
        return (tried and reason in told[-1]) or told[-1] == "connected"

    await until(says_so, f"refusal: {reason}")
    assert told[-1] != "connected"
    return told[-1]
