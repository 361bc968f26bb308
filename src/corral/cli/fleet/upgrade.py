"""`corral fleet upgrade`: all workers of the fleet move to another version of Corral."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command
from corral.cli.common.options import Detach, DryRun, Json, MaxErrors, MinRequests, reject_empty, soak_fields
from corral.cli.common.output import DONE, print_json, print_line, print_note, print_table
from corral.cli.operations.watch import follow_or_detach
from corral.kit.errors import Invalid

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.releases import FleetUpgradePlan

COLUMNS = ("NODE", "VERSION", "ACTION", "HARDWARE CLASS", "NOTE")
SERVICE_COLUMNS = ("ROLE", "NAME", "VERSION", "DO THERE", "WHY")


@destructive_command
async def upgrade_fleet(
    client: Client,
    wheel: Annotated[
        str, declare.Option("--wheel", metavar="FILE", help="the wheel of the version; it is uploaded and signed")
    ] = "",
    signature: Annotated[
        str,
        declare.Option(
            "--signature", metavar="FILE", help="of `corral fleet release-sign`, where the key is kept elsewhere"
        ),
    ] = "",
    to: Annotated[
        str | None,
        declare.Option("--to", metavar="VERSION", help="a release that the controllers hold, or their own version"),
    ] = None,
    node: Annotated[str, declare.Option("--node", metavar="NODE", help="only this node")] = "",
    selector: Annotated[
        str, declare.Option("--selector", "-l", metavar="LABELS", help="only nodes with these labels")
    ] = "",
    max_parallel: Annotated[
        str, declare.Option("--max-parallel", metavar="N|N%", help="how many nodes at once [25%]")
    ] = "",
    soak: Annotated[
        str,
        declare.Option(
            "--soak",
            metavar="TIME|N",
            help="watch the first node of each hardware class for this time (5m), or for N of its requests (200)",
            callback=reject_empty,
        ),
    ] = "",
    max_errors: MaxErrors = "",
    min_requests: MinRequests = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Upgrade Corral on the workers of the fleet.

    Without --wheel and --to, to the version of the controllers. One node of each hardware class begins; when it is
    ready, the others follow, as many at once as --max-parallel allows. Each worker builds the version beside the one
    that runs, lets it check itself, and hands over its port and its backends: no request fails. If the new version is
    not ready within a minute, the old one serves again, and no other node begins. Older versions are signed again
    with a higher counter, so that is also the way back.

    With --soak the first nodes are watched before the others follow. If one is not healthy for a minute, its worker
    ends by itself, or more of its requests fail, every node that has switched returns to its version before.
    `corral rollouts` shows how far it is, pauses, promotes and aborts.

    With --dry-run a wheel is uploaded, and nothing is signed or ordered. Gateway and controller of a `corral up`
    from `corral fleet install` follow when the operation has ended. Others are upgraded on their machines: the plan
    names the commands.

    \b
    Examples:
      corral fleet upgrade --dry-run
      corral fleet upgrade --wheel corral-1.2.0-py3-none-any.whl
      corral fleet upgrade --wheel corral-1.2.0-py3-none-any.whl --soak 10m
      corral fleet upgrade --to 1.1.0 --selector tier=test
      corral fleet upgrade --wheel corral-1.2.0-py3-none-any.whl --signature corral-1.2.0.release
    """
    from corral.contract.labels import parse_selector
    from corral.contract.releases import UpgradeFleet

    if to is not None and not to.strip():
        raise declare.BadParameter("--to needs a version: `corral fleet releases` lists them")
    if wheel and to:
        raise declare.BadParameter("give --wheel or --to, not both")
    if signature and not wheel:
        raise declare.BadParameter("--signature is of a wheel: give it with --wheel")
    trial = soak_fields(soak=soak, max_errors=max_errors, max_slowdown=None, min_requests=min_requests)
    if wheel:  # what can be refused without it is, before it is uploaded and signed
        try:
            parse_selector(selector)
        except ValueError as error:
            raise declare.BadParameter(f"--selector: {error}") from error
        if node:
            await client.nodes.get(node)
    sha256 = await send_release(client, wheel, signature, signs=not dry_run) if wheel else ""
    request = UpgradeFleet(
        sha256=sha256,
        version=to or "",
        node=node,
        selector=selector,
        max_parallel=max_parallel,
        dry_run=dry_run,
        **trial,
    )
    plan = await client.releases.upgrade(request)
    if as_json and (dry_run or detach):
        print_json(plan)
        return DONE
    if not as_json:
        _print_plan(plan)
    if dry_run:
        print_note("Nothing was ordered.")
        return DONE
    return await follow_or_detach(client, [plan.operation], detach=detach, as_json=as_json)


async def send_release(client: Client, wheel: str, signature: str = "", *, signs: bool = True) -> str:
    """Upload the wheel and make a release of it, or only upload it; return its SHA-256."""
    from corral.cli.common.roles import describe_wheel
    from corral.cli.models.upload import describe_files, find_parts, local_path, upload_files

    (path,) = find_parts(local_path(wheel))
    describe_wheel(path)  # before many bytes are sent for nothing
    signed = read_signature(signature) if signature else ""
    (file,) = await describe_files([path])
    await upload_files(client, [(path, file)], shlex.join(["corral", "fleet", "upgrade", "--wheel", wheel]))
    return (await client.releases.add(file.sha256, signed=signed)).sha256 if signs else file.sha256


def read_signature(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} cannot be read: give the file that `corral fleet release-sign` has written") from error


def _print_plan(plan: FleetUpgradePlan) -> None:
    soak = f", after a soak of {plan.soak}" if plan.soak else ""
    print_line(f"Corral {plan.version}, release {plan.counter}, {plan.max_parallel} of the nodes at once{soak}")
    rows = [
        (
            each.node,
            each.version or "unknown",
            "upgrade first" if each.is_canary else each.action,
            each.hardware_class,
            each.reason,
        )
        for each in plan.nodes
    ]
    print_table(COLUMNS, rows, empty="No nodes.")
    for note in filter(None, (note_on_downgrades(plan), note_on_missing_wheels(plan))):
        print_note(note)
    if plan.services:
        print_line()
        print_table(
            SERVICE_COLUMNS,
            [(each.role, each.name, each.version, each.command, each.reason) for each in plan.services],
            empty="",
        )


def note_on_missing_wheels(plan: FleetUpgradePlan) -> str:
    """Empty unless a soak would end without a way back."""
    names = [each.node for each in plan.nodes if each.action == "upgrade" and not each.returns_to]
    if not plan.soak or not names:
        return ""
    shown = _shown(names)
    return (
        f"Note: {shown} cannot be returned by itself, because the controllers have no wheel of the version there: "
        f"give that to `corral fleet upgrade --wheel` first, or bring them back by hand."
    )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def note_on_downgrades(plan: FleetUpgradePlan) -> str:
    """Empty unless nodes run a later version than the one of the plan."""
    from packaging.version import InvalidVersion, Version

    def is_later(version: str) -> bool:
        try:
            return Version(version) > Version(plan.version)
        except InvalidVersion:
            return False

    names = [each.node for each in plan.nodes if each.action == "upgrade" and is_later(each.version)]
    if not names:
        return ""
    return f"Note: this goes back to an earlier version on {_shown(names)}."
