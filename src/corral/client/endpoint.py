"""Finds the fleet's URL and key: from flags, otherwise from `CORRAL_*`, otherwise the fleet that runs on this
machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from corral.client.contexts import LocalFleet, choose_context, list_contexts
from corral.kit.errors import Invalid

_NO_FLEET = (
    "no fleet found: start one with `corral up`, or say where it is with --url and --key (CORRAL_URL and CORRAL_KEY)"
)
_NO_KEY = "no key: give --key, or set CORRAL_KEY or CORRAL_KEY_FILE (admin key: <data>/secrets/admin.key)"

_OF_THE_URL = ("CORRAL_URL", "CORRAL_KEY", "CORRAL_KEY_FILE", "CORRAL_CA")


class Endpoint(NamedTuple):
    url: str
    key: str
    ca: str = ""  # path of a PEM file, or `sha256:…` of the CA to pin; empty = the system's roots
    source: str = ""  # for messages: where the URL comes from
    data: str = ""  # folder of the fleet, where it is the one that runs on this machine
    context: str = ""  # its name, where it is a fleet of this machine
    others: tuple[str, ...] = ()  # other fleets that the user may have meant, as texts; empty if this one was named
    # A worker's certificate is for its node id. Before that is known, and without a key, checking the CA must be
    # enough.
    any_name: bool = False

    def __repr__(self) -> str:
        """Without the key."""
        shown = {name: value for name, value in self._asdict().items() if name != "key"}
        return f"Endpoint({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def find_endpoint(
    *,
    url: str | None = None,
    key: str | None = None,
    ca: str | None = None,
    context: str | None = None,
    env: Mapping[str, str],
) -> Endpoint:
    """Raises `Invalid` with the message to show. A key is only sent to its own fleet: the key of a fleet of this
    machine is used only with that fleet's URL, and `CORRAL_KEY` only with `CORRAL_URL` if that is set."""
    if url and context:
        raise Invalid("give --url or --context, not both: each says where the fleet is")
    if context:
        env = {name: value for name, value in env.items() if name not in _OF_THE_URL or "CORRAL_URL" not in env}
    chosen_url = url or env.get("CORRAL_URL") or ""
    chosen_key = key or env.get("CORRAL_KEY") or _read_key_file(env.get("CORRAL_KEY_FILE"))
    chosen_ca = ca or env.get("CORRAL_CA") or ""
    if chosen_url:
        return _at_url(chosen_url, chosen_key, chosen_ca, env, source="--url" if url else "CORRAL_URL")
    choice = choose_context(env, context)
    if choice is None:
        raise Invalid(_NO_FLEET)
    local = choice.context.fleet
    return Endpoint(
        local.url,
        chosen_key or _local_key(local),
        chosen_ca or local.ca_file,
        source=f"the fleet in {local.data}",
        data=local.data,
        context=choice.context.name,
        others=tuple(str(each) for each in choice.others),
    )


def _at_url(url: str, key: str, ca: str, env: Mapping[str, str], *, source: str) -> Endpoint:
    address = check_url(url)
    ours = next((each for each in list_contexts(env) if same_place(each.fleet.url, address)), None)
    found_key = key or (_local_key(ours.fleet) if ours else "")
    if not found_key:
        raise Invalid(_NO_KEY)
    if ours is None:
        return Endpoint(address, found_key, ca, source=source)
    return Endpoint(
        address, found_key, ca or ours.fleet.ca_file, source=source, data=ours.fleet.data, context=ours.name
    )


def check_url(text: str) -> str:
    """The URL without a trailing slash; `host:port` alone is taken as http. The base URL that OpenAI's
    clients are given, with `/v1` at its end, means the same fleet."""
    whole = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(whole)
        port = parts.port
    except ValueError as error:
        raise Invalid(f"{text!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise Invalid(f"{text!r} is not a URL such as http://127.0.0.1:8080 or https://fleet.example:8080")
    if parts.username or parts.password:
        raise Invalid("a URL with a user or password in it is not used: give the key with --key or CORRAL_KEY")
    return whole.rstrip("/").removesuffix("/v1").rstrip("/")


def same_place(one: str, other: str) -> bool:
    first, second = urlsplit(one), urlsplit(other)
    names = {first.hostname, second.hostname}
    same_host = len(names) == 1 or names <= {"127.0.0.1", "localhost", "::1"}
    return same_host and (first.scheme, first.port) == (second.scheme, second.port)


def _read_key_file(path: str | None) -> str:
    return read_key(Path(path).expanduser()) if path else ""


def _local_key(local: LocalFleet) -> str:
    return read_key(Path(local.admin_key_file))


def read_key(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise Invalid(f"the key in {path} cannot be read ({reason}): give another with --key or CORRAL_KEY") from error
    if not text or "\n" in text:
        raise Invalid(f"{path} does not hold a key: give another with --key or CORRAL_KEY")
    return text
