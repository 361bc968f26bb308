"""`up` talks to its own fleet while parts of it may be restarting."""

from __future__ import annotations

import pytest

from corral.cli.up.startup import retry_until_available
from corral.kit.errors import CorralError, Denied, OutcomeUnknown, Unavailable, Unreachable


async def test_a_part_that_is_away_for_long_is_waited_for() -> None:
    answers: list[CorralError | str] = [Unreachable("gateway"), Unavailable("controller"), OutcomeUnknown("cut")] * 40
    answers.append("done")

    async def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, CorralError):
            raise answer
        return answer

    assert await retry_until_available(ask, every_s=0) == "done"


async def test_what_waiting_cannot_cure_is_told() -> None:
    async def ask() -> str:
        raise Denied("another fleet's key")

    with pytest.raises(Denied):
        await retry_until_available(ask, every_s=0)
