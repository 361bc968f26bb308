"""Getting in: what a registry wants to see, made of its challenge and our login. Tokens are kept until they expire."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import aiohttp
import msgspec
from yarl import URL

from corral.blobs.oci.challenge import Basic, Bearer, read_challenge
from corral.blobs.oci.credentials import Credentials, Login
from corral.blobs.remote import Broken, read_bounded, shown, translated
from corral.kit.clock import Clock
from corral.kit.errors import Denied, Failed

MOST_TOKEN_BYTES = 1 << 20
SHORTEST_S = 60.0  # a token without a lifetime has this one (distribution spec)
EARLY_S = 10.0
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""
    expires_in: float | None = None


@dataclass(frozen=True)
class _Pass:
    header: str
    ends_s: float


class Access:
    """What to show, per host and repository."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials, clock: Clock) -> None:
        self._session = session
        self._credentials = credentials
        self._clock = clock
        self._passes: dict[tuple[str, str], _Pass] = {}

    def header(self, host: str, repository: str) -> dict[str, str]:
        """What worked last time and still does."""
        known = self._passes.get((host, repository))
        if known is None or known.ends_s - EARLY_S <= self._clock.monotonic():
            return {}
        return {"Authorization": known.header}

    async def answer(
        self, host: str, repository: str, response: aiohttp.ClientResponse, *, plain: bool
    ) -> dict[str, str]:
        """A 401 came. What to show instead; empty where we have nothing. Raises Broken, Denied, Failed."""
        challenge = read_challenge(", ".join(response.headers.getall("WWW-Authenticate", ())))
        # A login is kept under the name people use for the host, not under that of the machine that answers for it.
        login = await self._credentials.find(host)
        match challenge:
            case Bearer():
                got = await self._get_token(challenge, login, repository, plain=plain)
            case Basic() if login is not None and not login.is_token:
                got = _Pass(_basic(login), float("inf"))
            case _:
                return {}
        self._passes[host, repository] = got
        return {"Authorization": got.header}

    async def _get_token(self, challenge: Bearer, login: Login | None, repository: str, *, plain: bool) -> _Pass:
        what = shown(challenge.realm)
        async with translated(what):
            realm = URL(challenge.realm)
        if realm.scheme != "https" and not plain:
            raise Denied(f"the registry sends us to {what} for a token: not over plain http")
        asked = {"service": challenge.service, "scope": challenge.scope or f"repository:{repository}:pull"}
        asked = {name: value for name, value in asked.items() if value}
        async with translated(what):
            if login is not None and login.is_token:
                form = asked | {"grant_type": "refresh_token", "refresh_token": login.password, "client_id": "corral"}
                response = await self._session.post(realm, data=form, allow_redirects=False)
            else:
                headers = {"Authorization": _basic(login)} if login is not None else {}
                url = realm.update_query(asked)
                response = await self._session.get(url, headers=headers, allow_redirects=False)
        async with response:
            body = await read_bounded(response, MOST_TOKEN_BYTES, what)
            return self._read_token(response.status, body, what)

    def _read_token(self, status: int, body: bytes, what: str) -> _Pass:
        if status in TRANSIENT:
            raise Broken(f"{what} answered {status}")
        if status != 200:
            raise Denied(f"{what} answered {status}: it gives no token for this image")
        try:
            answer = msgspec.json.decode(body, type=_Token)
        except msgspec.MsgspecError as error:
            raise Failed(f"{what} sent something that is not a token") from error
        token = answer.token or answer.access_token
        if not token or not token.isprintable():
            raise Failed(f"{what} sent no token")
        lasts_s = max(answer.expires_in or SHORTEST_S, 0.0)
        return _Pass(f"Bearer {token}", self._clock.monotonic() + lasts_s)


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
