"""`up` talks to its own fleet while parts of it may be restarting."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from corral.cli.up.startup import is_journal, retry_until_available
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


def test_a_journal_is_the_file_that_systemd_names(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w") as journal, (tmp_path / "file").open("w") as file:
        found = os.fstat(journal.fileno())
        env = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert is_journal(env, journal)
        assert not is_journal(env, file), "a terminal or a file, in a session that systemd started"
        assert not is_journal({}, journal)
    assert not is_journal(env, io.StringIO())
