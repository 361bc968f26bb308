"""A request's folder goes with it, also when its client leaves while it is being made."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from corral.inference.request_files import LocalFiles


def left_in(folder: Path) -> list[Path]:
    return list(folder.glob("requests/*"))


@pytest.mark.parametrize("steps", range(4))
async def test_no_folder_is_left_of_a_request_that_was_given_up(tmp_path: Path, steps: int) -> None:
    async def request() -> None:
        async with LocalFiles(tmp_path / "requests").open():
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.05)  # for whatever a thread may still be doing
    assert left_in(tmp_path) == []
