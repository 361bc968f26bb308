"""`corral rollouts …`: shows and steers upgrades that proceed by hardware class, and trials of new revisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import Json
from corral.cli.common.output import key_value_lines, print_json, print_line, print_note, print_table, relative_time
from corral.cli.operations.commands import Operation, find
from corral.cli.operations.text import short_id

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.rollouts import RolloutClassView, RolloutView

app = declare.App(
    help="""Show, pause, promote and abort rollouts.

    A rollout is an upgrade that tries the new build of a backend, or a new version of Corral itself, on one node of
    each hardware class first, or an edit of a model that tries the new revision on a share of the requests first.

    \b
    Examples:
      corral rollouts list
      corral rollouts show 3f2a91c0
      corral rollouts promote 3f2a91c0
    """,
)
_COLUMNS = ("ID", "NAME", "PHASE", "SOAK", "STARTED", "NOTE")
_CLASS_COLUMNS = ("HARDWARE CLASS", "NODES", "FIRST", "STATE", "NEW", "OLD", "NOTE")
_TRIAL_COLUMNS = ("REVISION", "NODE", "STATE", "SHARE", "NEW", "OLD", "NOTE")
_FIGURE_COLUMNS = ("FIGURE", "JUDGEMENT")


@app.command("list")
@fleet_command
async def list_rollouts(client: Client, as_json: Json = False) -> None:
    """List rollouts, newest first.

    \b
    Examples:
      corral rollouts list
    """
    views = await client.rollouts.list()
    if as_json:
        print_json(views)
        return
    rows = [
        (
            short_id(each.operation_id),
            each.backend or f"model {each.model}",
            each.phase,
            each.soak or "none",
            relative_time(each.started_at),
            each.message,
        )
        for each in views
    ]
    print_table(_COLUMNS, rows, empty="No rollouts yet. Start one: `corral backends upgrade NAME --soak 5m`")


@app.command("show")
@fleet_command
async def show_rollout(client: Client, operation: Operation, as_json: Json = False) -> None:
    """Show hardware classes, and the figures of both builds.

    \b
    Examples:
      corral rollouts show 3f2a91c0
    """
    view = await client.rollouts.get((await find(client, operation)).job_id)
    if as_json:
        print_json(view)
        return
    for line in key_value_lines(_details(view)):
        print_line(line)
    print_line()
    columns, rows = (
        (_TRIAL_COLUMNS, [_trial_row(view, each) for each in view.classes])
        if view.model
        else (_CLASS_COLUMNS, [_class_row(each) for each in view.classes])
    )
    print_table(columns, rows, empty="No node takes part yet.")
    figures = [(figure.words, "worse" if figure.worse else "good") for each in view.classes for figure in each.figures]
    if figures:
        print_line()
        print_table(_FIGURE_COLUMNS, figures, empty="")


@app.command("pause")
@destructive_command
async def pause_rollout(client: Client, operation: Operation) -> None:
    """Pause a rollout. No further node switches; a bad build is still reverted.

    \b
    Examples:
      corral rollouts pause 3f2a91c0
    """
    await _steer(client, operation, "pause")


@app.command("resume")
@fleet_command
async def resume_rollout(client: Client, operation: Operation) -> None:
    """Resume a paused rollout.

    \b
    Examples:
      corral rollouts resume 3f2a91c0
    """
    await _steer(client, operation, "resume")


@app.command("promote")
@destructive_command
async def promote_rollout(client: Client, operation: Operation) -> None:
    """End the soaks of a rollout now; the other nodes follow.

    \b
    Examples:
      corral rollouts promote 3f2a91c0
    """
    await _steer(client, operation, "promote")


@app.command("abort")
@destructive_command
async def abort_rollout(client: Client, operation: Operation) -> None:
    """Abort a rollout. Nodes that have switched return to their previous version.

    \b
    Examples:
      corral rollouts abort 3f2a91c0
    """
    await _steer(client, operation, "abort")


async def _steer(client: Client, operation: str, action: str) -> None:
    view = await find(client, operation)
    steered = await client.rollouts.steer(view.job_id, action)
    short = short_id(view.job_id)
    print_note(f"{short} ({view.backend}) {steered.message}. Follow it: `corral ops watch {short}`")


def _details(view: RolloutView) -> list[tuple[str, str]]:
    limits = (
        f"at most {100 * view.max_errors:g} % of the requests more that fail, and at most {view.max_slowdown:g} times "
        f"as slow; judged from {_requests(view.min_requests)} of each on"
    )
    if view.is_corral:
        limits = (
            f"healthy, failed requests + {100 * view.max_errors:g} %, {view.min_requests} requests before and since"
        )
    return [
        ("id", view.operation_id),
        ("version" if view.is_corral else "backend", view.backend),
        ("model", view.model),
        ("revision", f"{view.revision[:8]}, before {view.old_revision[:8]}" if view.model else ""),
        ("plan", view.plan),
        ("phase", view.phase),
        ("state", view.message),
        ("soak", view.soak or "none"),
        ("limits", limits if view.soak else ""),
        ("at once", view.max_parallel if view.backend else ""),
        ("started", relative_time(view.started_at)),
        ("ended", relative_time(view.ended_at) if view.ended_at else ""),
        ("reverted by", " ".join(short_id(each) for each in view.reverted_by)),
    ]


def _trial_row(view: RolloutView, each: RolloutClassView) -> tuple[str, ...]:
    return (
        view.revision[:8],
        each.canary or "-",
        each.state,
        f"{view.percent} %",
        _requests(each.new_requests),
        _requests(each.old_requests),
        _note(each),
    )


def _class_row(each: RolloutClassView) -> tuple[str, ...]:
    return (
        each.name,
        str(len(each.nodes)),
        each.canary or "-",
        each.state,
        _requests(each.new_requests),
        _requests(each.old_requests),
        _note(each),
    )


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _note(each: RolloutClassView) -> str:
    deaths = (
        "1 process of the new build ended" if each.deaths == 1 else f"{each.deaths} processes of the new build ended"
    )
    return "; ".join(word for word in (each.passed or each.waiting, deaths if each.deaths else "") if word)
