"""The gateway's own calls to the controller: the view, loads, credentials for the bus, receipts.

Clients' requests do not pass here: `http/controller_relay.py` relays them as bytes.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import aiohttp

from corral.contract.codec import Undecodable, decode, encode
from corral.contract.http import Target
from corral.contract.loads import AskForLoad, LoadStatus
from corral.contract.receipts import RunningReport
from corral.contract.view import FleetView, GatewayBus
from corral.kit.errors import Denied, Failed, Invalid, Unavailable

T = TypeVar("T")

_MAY_BE_ABSENT = ("/internal/loads", "/internal/receipts", "/internal/running")
MAX_RESPONSE_BYTES = 256 * 1024 * 1024  # a view with a million keys


@dataclass(frozen=True, slots=True)
class ControllerAddress:
    """The controller's address, for the relay (`target`) and for the gateway's own calls (`base_url`)."""

    target: Target
    base_url: str


def parse_controller(text: str) -> ControllerAddress:
    """`unix:/run/corral/controller.sock`, `http://host:port` or `https://host[:port]`. Raises ValueError."""
    if text.startswith("unix:"):
        path = "/" + text.removeprefix("unix:").lstrip("/")
        if path == "/":
            raise ValueError(f"{text!r} names no socket; write unix:/path/to/controller.sock")
        # The controller fills this host into the bus's address: it is on this machine.
        return ControllerAddress(Target(unix_path=path), "http://127.0.0.1")
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{text!r} is neither unix:/path nor http(s)://host:port")
    if url.path not in ("", "/") or url.query or url.fragment or url.username:
        raise ValueError(f"{text!r} must be only http(s)://host:port, without path or user")
    port = url.port or (443 if url.scheme == "https" else 80)  # .port raises ValueError for an invalid port
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    target = Target(host=url.hostname, port=port, tls=url.scheme == "https")
    return ControllerAddress(target, f"{url.scheme}://{host}:{port}")


def controller_trust(ca: Path | None) -> ssl.SSLContext:
    """Trust for the controller's certificate: the given CA, or the system's CAs."""
    return _trust(ca, "the controller's CA")


def ingress_trust(ca: Path | None) -> ssl.SSLContext:
    """Trust for the certificates of workers' ingresses."""
    return _trust(ca, "the workers' CA")


def _trust(ca: Path | None, what: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"{what} cannot be used: {ca}: {error}") from error


@dataclass(frozen=True, slots=True)
class ReadView:
    view: FleetView
    etag: str


class ControllerLink:
    def __init__(
        self, session: aiohttp.ClientSession, address: ControllerAddress, gateway_key: str, *, timeout_s: float
    ) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._base_url = address.base_url
        self._headers = {"Authorization": f"Bearer {gateway_key}"}

    async def read_view(self, known_etag: str | None) -> ReadView | None:
        """The view, or None when the one with `known_etag` is still current."""
        headers = {**self._headers, "If-None-Match": known_etag} if known_etag else self._headers
        async with self._call("GET", "/internal/view", headers) as answer:
            if answer.status == 304 and known_etag:
                return None
            body = await _whole_body(answer)
            etag = answer.headers.get("ETag", "")
        # The decoder accepts absent fields, so `{}` from another program on that port would be a fleet without keys and
        # would lock out every client.
        if b'"revision"' not in body:
            raise Failed("the controller's response to /internal/view is not a view")
        return ReadView(_decoded(FleetView, body), etag)

    async def bus_credentials(self) -> GatewayBus:
        async with self._call("POST", "/internal/gateway/credentials", self._headers) as answer:
            return _decoded(GatewayBus, await _whole_body(answer))

    async def request_load(self, model: str) -> LoadStatus | None:
        body = encode(AskForLoad(model=model))
        async with self._call("POST", "/internal/loads", self._headers, body=body) as answer:
            return None if answer.status == 404 else _decoded(LoadStatus, await _whole_body(answer))

    async def load_status(self, model: str, since: int, wait_s: float) -> LoadStatus | None:
        path = f"/internal/loads/{quote(model, safe='')}?since={since}&wait_s={wait_s:g}"
        async with self._call("GET", path, self._headers, extra_timeout_s=wait_s) as answer:
            return None if answer.status == 404 else _decoded(LoadStatus, await _whole_body(answer))

    async def send_receipts(self, batch: bytes) -> None:
        async with self._call("POST", "/internal/receipts", self._headers, body=batch) as answer:
            if answer.status == 404:
                raise Failed("the controller does not accept receipts; is it older than this gateway?")

    async def send_running(self, report: RunningReport) -> None:
        """A controller that does not know the route is older than this gateway, and nobody looks there."""
        async with self._call("POST", "/internal/running", self._headers, body=encode(report)):
            pass

    @contextlib.asynccontextmanager
    async def _call(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        *,
        body: bytes | None = None,
        extra_timeout_s: float = 0.0,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
        try:
            async with self._session.request(
                method,
                self._base_url + path,
                headers=headers,
                data=body,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s + extra_timeout_s),
            ) as answer:
                _check(answer.status, path)
                yield answer
        except TimeoutError as error:
            raise Unavailable("the controller did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the controller cannot be reached: {error}") from error


@contextlib.asynccontextmanager
async def open_link(
    address: ControllerAddress, gateway_key: str, *, tls: ssl.SSLContext | None, timeout_s: float
) -> AsyncIterator[ControllerLink]:
    target = address.target
    connector: aiohttp.BaseConnector
    if target.unix_path:
        connector = aiohttp.UnixConnector(path=target.unix_path, limit=0)
    else:
        connector = aiohttp.TCPConnector(limit=0, ssl=tls or True)
    # No limit: each cold model has one long poll open, and the view must not wait behind them. trust_env stays off: a
    # proxy of the environment must never see the gateway's key.
    async with aiohttp.ClientSession(connector=connector) as session:
        yield ControllerLink(session, address, gateway_key, timeout_s=timeout_s)


def _check(status: int, path: str) -> None:
    if status in (401, 403):
        raise Denied(f"the controller refuses the gateway key ({status} on {path}); is it the one in its gateway.key?")
    if status >= 500:
        raise Unavailable(f"the controller answered {status} on {path}")
    if status not in (200, 201, 202, 204, 304) and not (status == 404 and path.startswith(_MAY_BE_ABSENT)):
        raise Failed(f"the controller answered {status} on {path}; is this a controller?")


async def _whole_body(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > MAX_RESPONSE_BYTES:
            raise Failed(f"the controller's answer is larger than {MAX_RESPONSE_BYTES} bytes")
    return bytes(body)


def _decoded(kind: type[T], body: bytes) -> T:
    try:
        return decode(kind, body)
    except Undecodable as error:
        raise Failed(f"the controller's answer cannot be read: {error}") from error
