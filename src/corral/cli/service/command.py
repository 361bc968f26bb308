"""`corral service …`: install, uninstall and show the services of this machine."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from corral.cli.common import declare
from corral.cli.common.options import DryRun, Json
from corral.cli.common.output import DONE, FAILED, print_json, print_line, print_note, print_table
from corral.cli.service.install import find_service, install, join_service, plan_install, save_join
from corral.cli.service.managers import Manager, ServiceStatus, find_manager, refuse_foreign
from corral.cli.service.service import ROLES, Service
from corral.kit.errors import Failed

app = declare.App(
    help="""Run Corral as a service, from the start of the machine on.

    systemd (Linux) or launchd (macOS) start it again when it ends. For root it is a service of the machine, else of
    the user. The settings of a service are in a file, /etc/corral/ROLE.env or ~/.config/corral/ROLE.env.

    \b
    Examples:
      corral service install --set CORRAL_LAN=true     the fleet of this machine, for other machines too
      corral join URL --token T --service              a worker that joins and stays
      corral service install worker                    the worker of a machine that has joined
      corral service install gateway --dry-run         only print the files
      corral service status
    """,
)
Role = Annotated[
    str, declare.Argument(metavar="ROLE", help="up, worker, controller or gateway", complete=lambda *_: list(ROLES))
]
AnyRole = Annotated[
    str | None,
    declare.Argument(metavar="ROLE", help="up, worker, controller or gateway", complete=lambda *_: list(ROLES)),
]
Data = Annotated[str | None, declare.Option("--data", metavar="PATH", help="data folder of the service (CORRAL_DATA)")]
COLUMNS = ("SERVICE", "STATE", "AT START", "PID", "FILE", "LOGS")
START_S = 5.0


@app.command("install")
def install_(
    role: Role = "up",
    data: Data = None,
    settings: Annotated[
        list[str] | None, declare.Option("--set", metavar="NAME=VALUE", help="a setting, such as CORRAL_LAN=true")
    ] = None,
    address: Annotated[
        str,
        declare.Option(
            "--socket", metavar="ADDRESS:PORT", help="systemd holds the public port, so no connection is refused"
        ),
    ] = "",
    dry_run: DryRun = False,
    no_start: Annotated[bool, declare.Option("--no-start", help="only write the files")] = False,
) -> int:
    """Install a service and start it; again to change it.

    \b
    Examples:
      corral service install --set CORRAL_LAN=true
      corral service install worker --set CORRAL_LABELS=tier=fast
      corral service install gateway --socket 0.0.0.0:443 --dry-run
    """
    service, text = plan_install(find_service(role, data), settings or [], address)
    manager = find_manager()
    if dry_run:
        print_files(service, text, manager)
        return DONE
    return install_and_report(service, text, manager, starts=not no_start)


@app.command("uninstall")
def uninstall(role: Role = "up") -> int:
    """Stop a service and remove its files, not its data.

    \b
    Examples:
      corral service uninstall worker
    """
    service, manager = find_service(role), find_manager()
    if not any(path.exists() for path in _installed_files(service, manager)):
        print_note(f"{service.name} is not installed.")
        return DONE
    installed = _as_installed(service, manager)
    refuse_foreign(manager.files(installed))
    manager.stop(installed)
    print_line(f"{service.name} uninstalled")
    print_note(f"Its data stays in {service.data}, its settings in {service.env_file}.")
    return DONE


@app.command("status")
def status(role: AnyRole = None, as_json: Json = False) -> int:
    """Show the services of this machine. Exit code 0: all of them run.

    \b
    Examples:
      corral service status
      corral service status worker --json
    """
    manager = find_manager()
    rows = [manager.status(find_service(each)) for each in ([role] if role else ROLES)]
    shown = [row for row in rows if row.is_installed or role]
    if as_json:
        print_json([asdict(row) for row in shown])
    else:
        print_table(
            COLUMNS, [_cells(row) for row in shown], empty="No service of Corral is installed: `corral service install`"
        )
    return DONE if all(row.state == "active" for row in shown) else FAILED


def install_and_report(service: Service, text: str, manager: Manager, *, starts: bool = True) -> int:
    """Raises Failed, before anything is written, where no services run."""
    if starts and (reason := manager.unavailable()):
        raise Failed(f"{reason}: `--dry-run` prints the files of the service, `--no-start` only writes them")
    install(service, text, manager, starts=starts)
    for path in manager.files(service):
        print_note(f"wrote {path}")
    if not starts:
        return DONE
    now = _wait_until_active(service, manager)
    if now.state != "active":
        raise Failed(f"{service.name} does not run ({now.state}): see `{now.logs}`")
    print_line(f"{service.name} runs, and starts with the machine")
    print_note(f"Logs: {now.logs}")
    return DONE


def join_as_service(settings: Any, flags: dict[str, Any]) -> int:
    """`corral join … --service`."""
    service, text = join_service(settings, flags)
    manager = find_manager()
    if reason := manager.unavailable():
        raise Failed(f"{reason}: leave out --service, or see `corral service install worker --dry-run`")
    save_join(service, settings, flags)
    code = install_and_report(service, text, manager)
    print_note(
        "If the node waits for approval: `corral nodes list` shows its name, `corral nodes approve NAME` admits it"
    )
    return code


def print_files(service: Service, text: str, manager: Manager) -> None:
    for path, content in {service.env_file: text.encode(), **manager.files(service)}.items():
        print_line(f"# {path}")
        print_line(content.decode())


def _wait_until_active(service: Service, manager: Manager) -> ServiceStatus:
    end = time.monotonic() + START_S
    while (now := manager.status(service)).state != "active" and time.monotonic() < end:
        time.sleep(0.1)
    return now


def _as_installed(service: Service, manager: Manager) -> Service:
    """With its socket unit, if it has one."""
    with_socket = replace(service, address="0.0.0.0:0")
    return with_socket if all(path.exists() for path in manager.files(with_socket)) else service


def _installed_files(service: Service, manager: Manager) -> list[Path]:
    return [path for path in manager.files(_as_installed(service, manager)) if path.exists()]


def _cells(row: ServiceStatus) -> tuple[str, ...]:
    if not row.is_installed:
        return (row.name, row.state, "", "", "", "")
    return (row.name, row.state, "yes" if row.is_enabled else "no", str(row.pid or ""), row.file, row.logs)
