"""`corral join URL --token T`: runs a worker that joins a fleet, or prints the environment of a LocalAI worker."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlsplit

from corral.cli.common import declare
from corral.cli.common.output import DONE, print_error, print_line, print_note
from corral.cli.common.roles import run_worker, saved_settings, settings_of
from corral.cli.common.settings_command import settings_command
from corral.cli.nodes.join_progress import report
from corral.cli.nodes.join_token import hide_token
from corral.client.contexts import list_contexts
from corral.client.endpoint import same_place
from corral.kit.durations import format_duration
from corral.kit.settings import value_of

HELP = """Join this machine to a fleet and run a worker.

`corral up` and `corral token create` print the command with URL and token. The token is needed once. Later,
`corral join` or `corral worker` without options continues as the same node: the options of the first start are saved in
the data folder. An option that is given again replaces the saved one.

It prints when it connects, waits for approval, is approved, and is ready; --verbose prints the log too.

If the fleet cannot be reached, the worker prints why and retries until it is stopped with Ctrl-C.

The process list (`ps`) does not show the token. To keep it out of the shell history too, give it in CORRAL_TOKEN, in a
--token-file, or on standard input with `--token -`.

\b
Examples:
  corral join https://fleet:8080 --token cj_… --ca sha256:…
  printf %s cj_… | corral join https://fleet:8080 --token - --ca sha256:…
  corral join https://fleet:8080 --token cj_… --ca sha256:… --service
  corral join http://127.0.0.1:8080 --token cj_… --data ~/second-worker --name second
  corral join https://fleet:8080 --token SHARED --localai      (print the environment of a LocalAI worker)
"""
CONNECT_TIMEOUT_S = 3.0
WARN_AFTER_S = 2.0
_SHOWN_OPTIONS = {"token", "token_file", "ca", "data", "name", "advertise", "labels", "host", "port", "vram_budget"}


def localai_environment(
    url: str, *, token: str, bus_url: str = "", bus_port: int = 4222, name: str = "", ca: str = ""
) -> list[tuple[str, str]]:
    """The variables of a LocalAI worker (docs/reference/wire/localai-settings.md#worker-settings). Pure."""
    secure = url.startswith("https://")
    host = urlsplit(url).hostname or "127.0.0.1"
    bus = bus_url or f"{'tls' if secure else 'nats'}://{f'[{host}]' if ':' in host else host}:{bus_port}"
    variables = [
        ("LOCALAI_REGISTER_TO", url.rstrip("/")),
        ("LOCALAI_REGISTRATION_TOKEN", token),
        ("LOCALAI_NATS_URL", bus),
        ("LOCALAI_NATS_REQUIRE_AUTH", "true"),
        ("LOCALAI_REGISTRATION_REQUIRE_AUTH", "true"),
    ]
    if name:
        variables.append(("LOCALAI_NODE_NAME", name))
    if secure and ca and not ca.startswith("sha256:"):
        # The first is for the bus. Go programs use the second for all other connections, registration included.
        variables += [("LOCALAI_NATS_TLS_CA", ca), ("SSL_CERT_FILE", ca)]
    return variables


def print_localai(given: dict[str, Any]) -> int:
    url, token = given.get("controller"), given.get("token")
    if not url or not token:
        raise declare.BadParameter(
            "--localai needs the URL of the fleet, and --token with the shared token (CORRAL_REGISTRATION_TOKEN)"
        )
    ca = given.get("ca") or ""
    variables = localai_environment(
        url,
        token=token,
        bus_url=given.get("bus_urls") or "",
        bus_port=_local_bus_port(url),
        name=given.get("name") or "",
        ca=ca,
    )
    for key, value in variables:
        print_line(f"export {key}={shlex.quote(value)}")
    print_note("Start the controller with --compat-localai and with this token as --registration-token.")
    if url.startswith("https://") and (not ca or ca.startswith("sha256:")):
        print_note(
            f"LocalAI cannot check a CA fingerprint: save {url.rstrip('/')}/ca.pem on the worker and add --ca FILE."
        )
    return DONE


def _local_bus_port(url: str) -> int:
    """The bus port of a fleet on this machine; the default port for other fleets."""
    for each in list_contexts(os.environ):
        if any(same_place(known, url) for known in (each.fleet.url, each.fleet.public_url)):
            return urlsplit(each.fleet.bus_url).port or 4222
    return 4222


def warn_if_unreachable(settings: Any) -> None:
    """Print why the fleet cannot be reached and what to check. The worker starts in any case, and retries."""
    url = value_of(settings, "controller")
    reason = connection_failure(url) if url else ""
    if not reason:
        return
    retry_cap = format_duration(value_of(settings, "retry_cap_s"))
    print_error(
        f"cannot connect to {url}: {reason}; the worker retries at least every {retry_cap} until Ctrl-C. Check the "
        "address, that the fleet runs there with `corral up --lan`, and that no firewall blocks the port"
    )


def connection_failure(url: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> str:
    """Why no TCP connection to the host of this URL can be opened; empty if it can."""
    try:
        parts = urlsplit(url)
        address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        socket.create_connection(address, timeout=timeout_s).close()
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except ValueError:
        return ""  # not a URL: the worker says so and ends
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _join_command() -> Callable[..., int]:
    flags: dict[str, Any] = {}
    as_service: list[str] = []
    is_verbose: list[bool] = []

    def read(given: dict[str, Any]) -> dict[str, Any] | int:
        """The flags of the worker; for --localai, the exit code after printing."""
        flags.update(
            {name: value for name, value in given.items() if name not in ("url", "localai", "service", "verbose")}
        )
        if given["url"]:
            flags["controller"] = given["url"]
        if given["localai"]:
            return print_localai(flags)
        as_service.extend(["yes"] if given["service"] else [])
        # A log that goes to a file or to a service is for later: it has everything.
        is_verbose.append(not sys.stderr.isatty() if given["verbose"] is None else given["verbose"])
        flags.update(hide_token(flags))
        return flags

    def run(settings: Any) -> int:
        if as_service:
            from corral.cli.service.command import join_as_service

            return join_as_service(settings, flags)
        # Later than what ends the worker at its start, such as a data folder that it cannot write: that is the message
        # then. In a thread, because the worker does not wait for the check.
        warning = threading.Timer(WARN_AFTER_S, warn_if_unreachable, (settings,))
        warning.daemon = True
        warning.start()
        if not is_verbose[-1] and not flags.get("log_level"):
            settings = replace(settings, log_level="error")
        try:
            return run_worker(settings, flags, report)
        finally:
            warning.cancel()

    return settings_command(
        settings_of("worker"),
        run,
        help=HELP,
        arguments={
            "url": Annotated[
                str | None, declare.Argument(metavar="URL", help="URL of the fleet; needed only for the first join")
            ],
            "localai": Annotated[
                bool | None,
                declare.Option("--localai", help="only print the environment variables for a LocalAI worker"),
            ],
            "verbose": Annotated[
                bool | None,
                declare.Option(
                    "--verbose/--no-verbose", help="also print the log; the default where the output is no terminal"
                ),
            ],
            "service": Annotated[
                bool | None,
                declare.Option("--service", help="run the worker as a service, from the start of the machine on"),
            ],
        },
        read=read,
        shown=lambda doc: doc.name in _SHOWN_OPTIONS,
        remembered=saved_settings,
    )


app = declare.App()
app.command("join")(_join_command())
