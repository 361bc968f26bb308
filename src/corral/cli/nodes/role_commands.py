"""`corral controller`, `gateway` and `worker`: run one role in the foreground, with its settings as options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from corral.cli.common import declare
from corral.cli.common.roles import reload_worker, run_role, run_worker, saved_settings, settings_of, upgrade_worker
from corral.cli.common.settings_command import settings_command
from corral.cli.nodes.join_token import hide_token

_HELP = {
    "controller": """Run a controller: scheduler, admin API and web page.

    \b
    Examples:
      corral controller --data /var/lib/corral --socket /run/corral/controller.sock
      CORRAL_STORE=postgresql://corral@db/corral corral controller --port 8081
    """,
    "gateway": """Run a gateway: the public port of the fleet.

    It serves the inference API, and passes the admin API and the web page on to a controller.

    \b
    Examples:
      corral gateway --controller unix:/run/corral/controller.sock --gateway-key-file /etc/corral/gateway.key
      corral gateway --controller https://10.0.0.2:8081 --host 0.0.0.0 --tls-cert srv.crt --tls-key srv.key
      corral gateway --controller unix:/run/corral/controller.sock --gateway-key-file gateway.key --processes 4
    """,
    "worker": """Run a worker on this machine. `corral join URL --token T` does the same with fewer options.

    The worker saves its options in settings.json of the data folder, and later starts use them. An option or a variable
    that is given again replaces the saved one. Tokens and other secrets are not saved. Give the token in CORRAL_TOKEN,
    in a --token-file, or on standard input with `--token -`.

    \b
    Examples:
      corral worker --controller https://fleet:8080 --token-file join.token --labels tier=fast
      corral worker --data /var/lib/corral/worker          (this data folder has joined before)
      corral worker --port 50051                           (later starts with this data folder use the same port)
      corral worker reload --data /var/lib/corral/worker   (a new worker process takes over; no request fails)
      corral worker upgrade --wheel corral-1.2.0-py3-none-any.whl   (the same, with another version of Corral)
    """,
}


def controller_app() -> declare.App:
    return _app("controller", _role_command("controller"))


def gateway_app() -> declare.App:
    return _app("gateway", _role_command("gateway"))


def worker_app() -> declare.App:
    return _app("worker", _worker_command())


def _app(name: str, command: Callable[..., int]) -> declare.App:
    app = declare.App()
    app.command(name)(command)
    return app


def _role_command(role: str) -> Callable[..., int]:
    return settings_command(settings_of(role), lambda settings: run_role(role, settings), help=_HELP[role])


def _worker_command() -> Callable[..., int]:
    """`corral worker` runs a worker; `reload` and `upgrade` find the running one by the same settings."""
    action = declare.Argument(
        metavar="[reload|upgrade]",
        help="replace the running worker by a new process, or by another version, without losing requests",
    )
    wheel = declare.Option("--wheel", metavar="FILE", help="upgrade: the wheel of the version")
    packages = declare.Option(
        "--packages",
        metavar="FOLDER",
        help="upgrade: the wheels of its dependencies; without it they come from the package index",
    )
    actions: list[str] = []
    files: dict[str, Path | None] = {}
    flags: dict[str, Any] = {}

    def read(given: dict[str, Any]) -> dict[str, Any]:
        word = given.pop("action")
        for name in ("wheel", "packages"):
            text = given.pop(name)
            files[name] = Path(text).expanduser().absolute() if text else None
        if word is not None:
            if word not in ("reload", "upgrade"):
                raise declare.BadParameter(f"unknown action {word!r}: the actions are `reload` and `upgrade`")
            actions.append(word)
        if (word == "upgrade") != (files["wheel"] is not None) or (files["packages"] and word != "upgrade"):
            raise declare.BadParameter("`upgrade` needs --wheel FILE, and only `upgrade` has --wheel and --packages")
        if not actions:
            flags.update(hide_token(given))
        return given | flags

    def run(settings: Any) -> int:
        if files["wheel"] is not None:
            return upgrade_worker(settings, files["wheel"], files["packages"])
        return reload_worker(settings) if actions else run_worker(settings, flags)

    arguments = {
        "action": Annotated[str | None, action],
        "wheel": Annotated[str | None, wheel],
        "packages": Annotated[str | None, packages],
    }
    return settings_command(
        settings_of("worker"),
        run,
        help=_HELP["worker"],
        arguments=arguments,
        read=read,
        remembered=saved_settings,
    )
