"""`corral doctor`: every check in turn, a line each, exit code 1 if anything must be mended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from corral.cli.doctor import machine_checks
from corral.cli.doctor.bus_door import check_bus_door
from corral.cli.doctor.findings import Finding, Level, fail, rows, summary, warn
from corral.cli.doctor.fleet_checks import check_fleet
from corral.cli.doctor.port_checks import check_ports
from corral.cli.folder import DataFolder, default_data
from corral.cli.output import DONE, FAILED, print_json, print_table, remark
from corral.cli.run import find_bus_program, wanted_schema
from corral.cli.up import machine
from corral.client import Client, LocalFleet, find_endpoint
from corral.client.contexts import choose_context
from corral.kit.errors import CorralError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def doctor(
    data: Annotated[
        Path | None, typer.Option("--data", metavar="PATH", help="data folder to look at (CORRAL_DATA)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, nothing else on stdout")] = False,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="where the fleet is (CORRAL_URL)")] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="API key; better in CORRAL_KEY")] = None,
    ca: Annotated[str | None, typer.Option("--ca", metavar="CA", help="CA of the fleet (CORRAL_CA)")] = None,
    context: Annotated[
        str | None, typer.Option("--context", metavar="NAME", help="fleet of this machine (CORRAL_CONTEXT)")
    ] = None,
) -> int:
    """Look at everything a fleet stands on and say how to mend what is wrong. Changes nothing.

    \b
    Examples:
      corral doctor
      corral doctor --json | jq '.[] | select(.level != "ok")'
    """
    choice = choose_context(os.environ, context)
    local = choice.context.fleet if choice else None
    folder = DataFolder(data.expanduser().absolute() if data else _folder_of(local))
    findings = [*check_machine(folder, os.environ.get("CORRAL_STORE") or "")]
    of_fleet = asyncio.run(_ask(folder, local, url=url, key=key, ca=ca, context=context))
    findings = [*without_repeated(findings, of_fleet), *of_fleet]
    if as_json:
        print_json([each.as_data() for each in findings])
    else:
        print_table(("", "ABOUT", "SEEN"), rows(findings), empty="")
        remark(summary(findings))
    return FAILED if any(each.level is Level.FAIL for each in findings) else DONE


def _folder_of(local: LocalFleet | None) -> Path:
    return Path(local.data) if local is not None and "CORRAL_DATA" not in os.environ else default_data(os.environ)


def check_machine(folder: DataFolder, store: str) -> Iterator[Finding]:
    yield machine_checks.check_python()
    yield machine_checks.check_bus_program(find_bus_program)
    yield machine_checks.check_open_files()
    yield machine_checks.check_folder(folder)
    yield machine_checks.check_disk(folder.root)
    yield from _guarded("secrets", machine_checks.check_secrets(folder))
    yield from _guarded("backends", machine_checks.check_backend_user(folder))
    names = frozenset((*machine.host_names(), *machine.addresses()))
    yield from _guarded("certificate", machine_checks.check_certificates(folder, names, datetime.now(UTC)))
    if not store or store.startswith("sqlite:"):
        path = Path(store.removeprefix("sqlite:///")) if store else folder.database
        yield machine_checks.check_database(path, *wanted_schema())
    yield from _guarded("running", check_ports(folder, os.environ))


def without_repeated(findings: list[Finding], of_fleet: list[Finding]) -> list[Finding]:
    """What the fleet says of this machine's node as well is said once, with the node's name."""
    told = [each.seen for each in of_fleet if each.level is not Level.OK]
    return [each for each in findings if not any(seen.endswith(f": {each.seen}") for seen in told)]


def _halves(message: str) -> tuple[str, str]:
    seen, _, mend = message.partition(": ")
    return seen, mend


def _guarded(about: str, checks: Iterator[Finding]) -> Iterator[Finding]:
    """A folder we may not even look into is a finding too."""
    try:
        yield from checks
    except OSError as error:
        yield fail(about, f"{error.filename}: {error.strerror}", "run doctor as the user that runs the fleet")


async def _ask(
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
        seen, _, mend = error.message.partition(": ")
        return [warn("fleet", seen, mend)]
    try:
        async with Client(endpoint, timeout_s=10.0) as client:
            return [finding async for finding in _fleet(client, local)]
    except CorralError as error:
        return [fail("fleet", *_halves(error.message))]


async def _fleet(client: Client, local: LocalFleet | None) -> AsyncIterator[Finding]:
    async for finding in check_fleet(client, datetime.now(UTC)):
        yield finding
    if local is not None and local.bus_url and local.url == client.endpoint.url:
        yield await check_bus_door(local.bus_url)
