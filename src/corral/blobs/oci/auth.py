"""Authorization for registries: from a registry's challenge and a stored login. Tokens are cached until they expire."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import aiohttp
import msgspec
from yarl import URL

from corral.blobs.oci.challenge import Basic, Bearer, read_challenge
from corral.blobs.oci.credentials import Credentials, Login
from corral.blobs.transfer.remote import TransferBroken, display_url, read_bounded, translate_errors
from corral.kit.clock import Clock
from corral.kit.errors import Denied, Failed

MAX_TOKEN_BYTES = 1 << 20
DEFAULT_LIFETIME_S = 60.0  # of a token that states none (distribution spec)
EARLY_S = 10.0
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""
    expires_in: float | None = None


@dataclass(frozen=True)
class _Authorization:
    header: str
    expires_s: float


class RegistryAuth:
    """The Authorization header per host and repository."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials, clock: Clock) -> None:
        self._session = session
        self._credentials = credentials
        self._clock = clock
        self._cached: dict[tuple[str, str], _Authorization] = {}

    def header(self, host: str, repository: str) -> dict[str, str]:
        """The cached header, if it is still valid."""
        known = self._cached.get((host, repository))
        if known is None or known.expires_s - EARLY_S <= self._clock.monotonic():
            return {}
        return {"Authorization": known.header}

    async def answer(
        self, host: str, repository: str, response: aiohttp.ClientResponse, *, plain: bool
    ) -> dict[str, str]:
        """The header that answers a 401; empty if there is no login for it. Raises TransferBroken, Denied, Failed."""
        challenge = read_challenge(", ".join(response.headers.getall("WWW-Authenticate", ())))
        # A login is stored under the host's usual name, not under the name of the machine that serves it.
        login = await self._credentials.find(host)
        match challenge:
            case Bearer():
                got = await self._get_token(challenge, login, repository, plain=plain)
            case Basic() if login is not None and not login.is_token:
                got = _Authorization(_basic(login), float("inf"))
            case _:
                return {}
        self._cached[host, repository] = got
        return {"Authorization": got.header}

    async def _get_token(
        self, challenge: Bearer, login: Login | None, repository: str, *, plain: bool
    ) -> _Authorization:
        what = display_url(challenge.realm)
        async with translate_errors(what):
            realm = URL(challenge.realm)
        if realm.scheme != "https" and not plain:
            raise Denied(f"the registry demands a token from {what} over plain http, which is refused")
        parameters = {"service": challenge.service, "scope": challenge.scope or f"repository:{repository}:pull"}
        parameters = {name: value for name, value in parameters.items() if value}
        async with translate_errors(what):
            if login is not None and login.is_token:
                form = parameters | {
                    "grant_type": "refresh_token",
                    "refresh_token": login.password,
                    "client_id": "corral",
                }
                response = await self._session.post(realm, data=form, allow_redirects=False)
            else:
                headers = {"Authorization": _basic(login)} if login is not None else {}
                url = realm.update_query(parameters)
                response = await self._session.get(url, headers=headers, allow_redirects=False)
        async with response:
            body = await read_bounded(response, MAX_TOKEN_BYTES, what)
            return self._read_token(response.status, body, what)

    def _read_token(self, status: int, body: bytes, what: str) -> _Authorization:
        if status in TRANSIENT:
            raise TransferBroken(f"{what} answered {status}")
        if status != 200:
            raise Denied(f"{what} answered {status}: no token was issued for this image")
        try:
            answer = msgspec.json.decode(body, type=_Token)
        except msgspec.MsgspecError as error:
            raise Failed(f"{what} sent something that is not a token") from error
        token = answer.token or answer.access_token
        if not token or not token.isprintable():
            raise Failed(f"{what} sent no token")
        lasts_s = max(answer.expires_in or DEFAULT_LIFETIME_S, 0.0)
        return _Authorization(f"Bearer {token}", self._clock.monotonic() + lasts_s)


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
