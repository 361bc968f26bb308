"""`corral doctor`: runs every check and prints a line for each; exit code 1 if there is a problem."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

from corral.cli.common import declare
from corral.cli.common.data_folder import DataFolder, default_data
from corral.cli.common.options import Ca, Context, Data, Json, Key, Url
from corral.cli.common.output import DONE, FAILED, print_json, print_note, print_table
from corral.cli.common.roles import expected_schema, find_bus_server
from corral.cli.doctor import machine_checks
from corral.cli.doctor.bus_check import check_bus_access
from corral.cli.doctor.findings import Finding, Level, fail, rows, summary, warn
from corral.cli.doctor.fleet_checks import check_fleet
from corral.cli.doctor.port_checks import check_ports
from corral.cli.up import machine
from corral.client import Client, LocalFleet, find_endpoint
from corral.client.contexts import choose_context
from corral.kit.errors import CorralError

app = declare.App()


@app.command("doctor")
def doctor(
    command_context: declare.Context,
    data: Data = None,
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    ca: Ca = None,
    context: Context = None,
) -> int:
    """Find problems and show how to fix them.

    It checks this machine and the fleet, and changes nothing.

    Exit code 0: no problems, warnings at most. 1: at least one problem.

    \b
    Examples:
      corral doctor
      corral doctor --json | jq '.[] | select(.level != "ok")'
    """
    context = context or command_context.find_root().params.get("fleet")
    choice = choose_context(os.environ, context)
    local = choice.context.fleet if choice else None
    folder = DataFolder(Path(data).expanduser().absolute() if data else _folder_of(local))
    findings = find_problems(folder, local, url=url, key=key, ca=ca, context=context)
    if as_json:
        print_json([each.as_data() for each in findings])
    else:
        print_table(("", "CHECK", "RESULT"), rows(findings), empty="")
        print_note(summary(findings))
    return FAILED if any(each.level is Level.FAIL for each in findings) else DONE


def find_problems(
    folder: DataFolder,
    local: LocalFleet | None,
    *,
    url: str | None = None,
    key: str | None = None,
    ca: str | None = None,
    context: str | None = None,
) -> list[Finding]:
    """Run every check: of this machine, then of the fleet."""
    findings = [*check_machine(folder, os.environ.get("CORRAL_STORE") or "")]
    fleet_findings = asyncio.run(_check_fleet(folder, local, url=url, key=key, ca=ca, context=context))
    return [*drop_repeated(findings, fleet_findings), *fleet_findings]


def _folder_of(local: LocalFleet | None) -> Path:
    return Path(local.data) if local is not None and "CORRAL_DATA" not in os.environ else default_data(os.environ)


def check_machine(folder: DataFolder, store: str) -> Iterator[Finding]:
    yield machine_checks.check_python()
    yield machine_checks.check_bus_server(find_bus_server)
    yield machine_checks.check_open_files()
    yield machine_checks.check_folder(folder)
    yield machine_checks.check_disk(folder.root)
    yield from _guarded("secrets", machine_checks.check_secrets(folder))
    yield from _guarded("backends", machine_checks.check_backend_user(folder))
    names = frozenset((*machine.host_names(), *machine.addresses()))
    yield from _guarded("certificate", machine_checks.check_certificates(folder, names, datetime.now(UTC)))
    if not store or store.startswith("sqlite:"):
        path = Path(store.removeprefix("sqlite:///")) if store else folder.database
        yield machine_checks.check_database(path, *expected_schema())
    yield from _guarded("running", check_ports(folder, os.environ))


def drop_repeated(findings: list[Finding], fleet_findings: list[Finding]) -> list[Finding]:
    """Drop findings about this machine that the fleet reports too, with the name of the node."""
    reported = [each.seen for each in fleet_findings if each.level is not Level.OK]
    return [each for each in findings if not any(seen.endswith(f": {each.seen}") for seen in reported)]


def _cause_and_fix(message: str) -> tuple[str, str]:
    seen, _, fix = message.partition(": ")
    return seen, fix


def _guarded(about: str, checks: Iterator[Finding]) -> Iterator[Finding]:
    """Report a folder that cannot be read as a finding."""
    try:
        yield from checks
    except OSError as error:
        yield fail(about, f"{error.filename}: {error.strerror}", "run `corral doctor` as the user that runs the fleet")


async def _check_fleet(
    folder: DataFolder,
    local: LocalFleet | None,
    *,
    url: str | None,
    key: str | None,
    ca: str | None,
    context: str | None,
) -> list[Finding]:
    try:
        endpoint = find_endpoint(url=url, key=key, ca=ca, context=context, env=os.environ)
    except CorralError as error:
        return [warn("fleet", *_cause_and_fix(error.message))]
    try:
        async with Client(endpoint, timeout_s=10.0) as client:
            return [finding async for finding in _fleet(client, local)]
    except CorralError as error:
        return [fail("fleet", *_cause_and_fix(error.message))]


async def _fleet(client: Client, local: LocalFleet | None) -> AsyncIterator[Finding]:
    async for finding in check_fleet(client, datetime.now(UTC)):
        yield finding
    if local is not None and local.bus_url and local.url == client.endpoint.url:
        yield await check_bus_access(local.bus_url)
