"""A browser in so far as forms and cookies are concerned."""

from __future__ import annotations

import re

from httpx import AsyncClient, Response

from tests.support.page import PageApp


class Browser:
    def __init__(self, client: AsyncClient, page: PageApp) -> None:
        self.client = client
        self.page = page

    async def get(self, path: str, **headers: str) -> Response:
        return await self.client.get(path, headers=_named(headers), follow_redirects=False)

    async def post(self, path: str, fields: dict[str, str], **headers: str) -> Response:
        return await self.client.post(path, data=fields, headers=_named(headers), follow_redirects=False)

    async def form(self) -> dict[str, str]:
        """The hidden fields of the sign-in form, fetched as a person would."""
        text = (await self.get("/login")).text
        return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', text))

    async def sign_in(self, key: str, **headers: str) -> Response:
        return await self.post("/login", {**await self.form(), "key": key}, **headers)

    async def signed_in(self, role: str = "admin") -> Browser:
        answer = await self.sign_in(await self.page.key(role))
        assert answer.status_code == 303, answer.text
        return self

    @property
    def session(self) -> str:
        return str(self.client.cookies.get("corral_session", ""))

    async def csrf(self, path: str = "/") -> str:
        found = re.search(r'data-csrf="(\w+)"', (await self.get(path)).text)
        assert found
        return found.group(1)


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
