"""`corral join URL --token T`: this machine becomes a node, in the foreground. Or a LocalAI worker's environment."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from corral.cli.join_token import hide_token
from corral.cli.options import command_of
from corral.cli.output import DONE, remark, tell
from corral.cli.run import remembered_settings, run_worker, settings_of
from corral.client.contexts import list_contexts
from corral.client.endpoint import same_place

HELP = """Bring this machine into a fleet, and work for it until stopped.

The line with URL and token comes from `corral up` or `corral token create`. The token is needed once; later
`corral join` (or `corral worker`) alone goes on as the same node, with the flags of the first time: they are kept in
the data folder, and whatever is given later wins.

The token does not stay visible in `ps`. To keep it out of the command line altogether, give it in CORRAL_TOKEN, in a
--token-file, or on standard input with `--token -`.

\b
Examples:
  corral join https://fleet:8080 --token cj_… --ca sha256:…
  printf %s cj_… | corral join https://fleet:8080 --token - --ca sha256:…
  corral join http://127.0.0.1:8080 --token cj_… --data ~/second-worker --name second
  corral join https://fleet:8080 --token SHARED --localai      (prints a LocalAI worker's environment)
"""
_SHOWN = {"token", "token_file", "ca", "data", "name", "advertise", "labels", "host", "port", "vram_budget"}


def localai_environment(
    url: str, *, token: str, bus_url: str = "", bus_port: int = 4222, name: str = "", ca: str = ""
) -> list[tuple[str, str]]:
    """What a LocalAI worker must be given to join us (docs/reference/wire/localai-settings.md#worker-settings).
    Pure."""
    secure = url.startswith("https://")
    host = urlsplit(url).hostname or "127.0.0.1"
    bus = bus_url or f"{'tls' if secure else 'nats'}://{f'[{host}]' if ':' in host else host}:{bus_port}"
    pairs = [
        ("LOCALAI_REGISTER_TO", url.rstrip("/")),
        ("LOCALAI_REGISTRATION_TOKEN", token),
        ("LOCALAI_NATS_URL", bus),
        ("LOCALAI_NATS_REQUIRE_AUTH", "true"),
        ("LOCALAI_REGISTRATION_REQUIRE_AUTH", "true"),
    ]
    if name:
        pairs.append(("LOCALAI_NODE_NAME", name))
    if secure and ca and not ca.startswith("sha256:"):
        # The first is for the bus; Go programs take the second for everything else, registration included.
        pairs += [("LOCALAI_NATS_TLS_CA", ca), ("SSL_CERT_FILE", ca)]
    return pairs


def print_localai(given: dict[str, Any]) -> int:
    url, token = given.get("controller"), given.get("token")
    if not url or not token:
        raise typer.BadParameter(
            "--localai needs the URL and --token with the shared token (CORRAL_REGISTRATION_TOKEN)"
        )
    ca = given.get("ca") or ""
    pairs = localai_environment(
        url,
        token=token,
        bus_url=given.get("bus_urls") or "",
        bus_port=_local_bus_port(url),
        name=given.get("name") or "",
        ca=ca,
    )
    for key, value in pairs:
        tell(f"export {key}={shlex.quote(value)}")
    remark("The controller must run with --compat-localai and this token as --registration-token.")
    if url.startswith("https://") and (not ca or ca.startswith("sha256:")):
        remark(f"Save {url.rstrip('/')}/ca.pem on the worker and add --ca FILE: LocalAI cannot pin a fingerprint.")
    return DONE


def _local_bus_port(url: str) -> int:
    """The fleet on this machine may have its bus elsewhere than usual; of others we only know the usual."""
    for each in list_contexts(os.environ):
        if any(same_place(known, url) for known in (each.fleet.url, each.fleet.public_url)):
            return urlsplit(each.fleet.bus_url).port or 4222
    return 4222


def _join_command() -> Callable[..., int]:
    flags: dict[str, Any] = {}

    def read(given: dict[str, Any]) -> dict[str, Any] | int:
        """The worker's flags; or, for --localai, the exit code of what was printed instead."""
        flags.update({name: value for name, value in given.items() if name not in ("url", "localai")})
        if given["url"]:
            flags["controller"] = given["url"]
        if given["localai"]:
            return print_localai(flags)
        flags.update(hide_token(flags))
        return flags

    return command_of(
        settings_of("worker"),
        lambda settings: run_worker(settings, flags),
        help=HELP,
        arguments={
            "url": Annotated[str | None, typer.Argument(metavar="URL", help="of the fleet; once joined not needed")],
            "localai": Annotated[
                bool | None, typer.Option("--localai", help="only print the environment a LocalAI worker needs")
            ],
        },
        read=read,
        shown=lambda doc: doc.name in _SHOWN,
        remembered=remembered_settings,
    )


app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command("join")(_join_command())
