"""Logins for registries, as the container tools store them: Docker's config file and its credential helpers."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from corral.contract.sources import IMAGE_HOSTS
from corral.kit.errors import Failed
from corral.kit.log import get_log
from corral.kit.subprocesses import capture_program

log = get_log(__name__)

HELPER_TIMEOUT_S = 15.0
HUB = IMAGE_HOSTS[-1]
_HELPER = re.compile(r"[A-Za-z0-9._-]+\Z")


@dataclass(frozen=True)
class Login:
    user: str
    password: str = field(repr=False)
    is_token: bool = False  # the password is a refresh token, and there is no user


class Credentials(Protocol):
    async def find(self, host: str) -> Login | None:
        """None: there is no login for this host."""


@dataclass(frozen=True)
class FixedLogins:
    """Logins given at start, by host."""

    logins: Mapping[str, Login] = field(default_factory=dict)

    async def find(self, host: str) -> Login | None:
        return self.logins.get(host)


class _Auth(msgspec.Struct, frozen=True):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""


class _Config(msgspec.Struct, frozen=True):
    auths: dict[str, _Auth] = {}
    helpers: dict[str, str] = msgspec.field(default_factory=dict, name="credHelpers")
    store: str = msgspec.field(default="", name="credsStore")


class _Helped(msgspec.Struct, frozen=True):
    user: str = msgspec.field(default="", name="Username")
    secret: str = msgspec.field(default="", name="Secret")


class DockerConfig:
    """`$DOCKER_CONFIG/config.json` or `~/.docker/config.json`, read for every request: users log in while Corral
    runs."""

    def __init__(self, env: Mapping[str, str], *, helper_timeout_s: float = HELPER_TIMEOUT_S) -> None:
        self._env = env
        folder = env.get("DOCKER_CONFIG") or os.path.join(env.get("HOME", "/"), ".docker")
        self._path = Path(folder) / "config.json"
        self._helper_timeout_s = helper_timeout_s

    async def find(self, host: str) -> Login | None:
        try:
            config = msgspec.json.decode(self._path.read_bytes(), type=_Config)
        except OSError:
            return None
        except msgspec.MsgspecError as error:
            log.warning("docker config cannot be read", file=str(self._path), reason=str(error))
            return None
        for name in _names(host):
            helper = config.helpers.get(name) or config.store
            login = await self._ask(helper, name) if helper else None
            if (login := login or _read_auth(config.auths.get(name))) is not None:
                return login
        return None

    async def _ask(self, helper: str, host: str) -> Login | None:
        """`docker-credential-<helper> get`, the host on its input. On any error there is no login."""
        if not _HELPER.match(helper):
            return None
        command = (f"docker-credential-{helper}", "get")
        try:
            ran = await capture_program(command, env=self._env, timeout_s=self._helper_timeout_s, stdin=host)
            answer = msgspec.json.decode(ran.stdout if ran.status == 0 else "", type=_Helped)
        except (Failed, msgspec.MsgspecError):
            return None
        return Login(answer.user, answer.secret, is_token=answer.user == "<token>") if answer.secret else None


def _names(host: str) -> tuple[str, ...]:
    """The names under which a host's login may be stored; the hub's is a URL for historical reasons."""
    hub = (f"https://index.{HUB}/v1/", f"index.{HUB}") if host == HUB else ()
    return (host, f"https://{host}", *hub)


def _read_auth(auth: _Auth | None) -> Login | None:
    if auth is None:
        return None
    if auth.identitytoken:
        return Login("", auth.identitytoken, is_token=True)
    if auth.auth:
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            user, colon, password = base64.b64decode(auth.auth, validate=True).decode().rstrip("\0").partition(":")
            if colon:
                return Login(user, password)
        return None
    return Login(auth.username, auth.password) if auth.username else None
