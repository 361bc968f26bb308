"""Requests with files for the mock behind a worker's ingress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp

from tests.integration.inference.conftest import Bridged


def left_behind(folder: Path) -> list[Path]:
    return list((folder / "requests").glob("*"))


async def send_form(mock: Bridged, path: str, files: dict[str, bytes], **fields: str) -> tuple[int, Any]:
    """`files`: by field; JSON is read, other answers are bytes."""
    form = aiohttp.FormData()
    for name, value in fields.items():
        form.add_field(name, value)
    for name, content in files.items():
        form.add_field(name, content, filename="../../etc/passwd")
    return await post(mock, path, data=form)


async def post(mock: Bridged, path: str, **sent: Any) -> tuple[int, Any]:
    headers = {**mock.site.headers(), **sent.pop("headers", {})}
    async with (
        aiohttp.ClientSession() as session,
        session.post(mock.url + path, headers=headers, **sent) as answer,
    ):
        content = await answer.read()
        return answer.status, json.loads(content) if answer.content_type == "application/json" else content
