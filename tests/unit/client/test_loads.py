"""A load that is followed outlives the controller that began it."""

from __future__ import annotations

from typing import Any, cast

from corral.client.connection import ApiConnection
from corral.client.resources.loads import Loads
from corral.contract.loads import LoadStatus
from corral.kit.errors import CorralError, NotFound, Unavailable, Unreachable


class ScriptedCaller:
    def __init__(self, *answers: LoadStatus | CorralError) -> None:
        self._answers = list(answers)
        self.paths: list[str] = []

    async def call(self, method: str, path: str, *_: Any, **__: Any) -> LoadStatus:
        self.paths.append(path)
        answer = self._answers.pop(0)
        if isinstance(answer, CorralError):
            raise answer
        return answer


def loads_of(caller: ScriptedCaller) -> Loads:
    return Loads(cast(ApiConnection, caller), retry_s=(0.0, 0.0))


BEGUN = LoadStatus(model="tiny", state="loading", message="it is starting on barn", version=4)


async def test_a_controller_that_goes_away_is_waited_for() -> None:
    caller = ScriptedCaller(
        Unavailable("it restarts"), Unreachable("nobody there"), LoadStatus(model="tiny", state="loaded", version=6)
    )
    seen = [(status.state, status.message) async for status in loads_of(caller).follow(BEGUN)]
    away = ("loading", "waiting for the controller, which does not answer now")
    assert seen == [("loading", "it is starting on barn"), away, away, ("loaded", "")]
    assert set(caller.paths) == {"/api/models/tiny/load-status?since=4&wait_s=20"}


async def test_one_that_was_taken_back_is_over() -> None:
    caller = ScriptedCaller(Unavailable("it restarts"), NotFound("no such load"))
    assert [status.state async for status in loads_of(caller).follow(BEGUN)] == ["loading", "loading"]
