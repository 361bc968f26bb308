"""Staying with operations until nothing moves: bars on a terminal, lines elsewhere, JSON for scripts.

Ctrl-C lets go of them: they are the fleet's, not this command's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from corral.cli import operation_board, operation_text
from corral.cli.output import DONE, UNDER_WAY, complain, console, print_json, remark, tell

if TYPE_CHECKING:
    from rich.live import Live

    from corral.client import Client
    from corral.client.operation_watch import Watcher
    from corral.contract.admin import OperationView


async def stay(client: Client, ids: Sequence[str], *, detach: bool, as_json: bool) -> int:
    """What a command does that has asked for something: watch, or say at once what to watch."""
    if not detach:
        return await watch(client, ids, as_json=as_json)
    if as_json:
        print_json([await client.operations.get(each) for each in ids])
    else:
        for each in ids:
            tell(each)
        remark(f"`corral ops watch {' '.join(operation_text.short_id(each) for each in ids)}` follows it.")
    return DONE


async def watch(client: Client, ids: Sequence[str], *, as_json: bool = False, to_the_end: bool = False) -> int:
    """Until everything has settled (`to_the_end`: until every node has ended). Says what remains; the exit code."""
    with ExitStack() as stack:
        watcher: Watcher = Silent() if as_json else _shown(ids, stack)
        views = await _follow(client, ids, watcher, to_the_end=to_the_end)
    if views is None:
        return _let_go(ids)
    if as_json:
        print_json(views)
    else:
        for view in views:
            for line in operation_text.report(view):
                tell(line)
        for line in operation_text.how_to_go_on(views):
            remark(line)
    return operation_text.exit_code(views)


async def wait(client: Client, ids: Sequence[str]) -> int:
    """The same without a word."""
    views = await _follow(client, ids, Silent(), to_the_end=False)
    return _let_go(ids) if views is None else operation_text.exit_code(views)


async def watch_as_json_lines(client: Client, ids: Sequence[str], *, to_the_end: bool = False) -> int:
    """Every change as a line of JSON."""
    views = await _follow(client, ids, JsonLines(), to_the_end=to_the_end)
    return _let_go(ids) if views is None else operation_text.exit_code(views)


async def _follow(
    client: Client, ids: Sequence[str], watcher: Watcher, *, to_the_end: bool
) -> list[OperationView] | None:
    """None: somebody pressed Ctrl-C."""
    from corral.client.operation_watch import Following

    over = (lambda view: view.state == "done") if to_the_end else (lambda view: view.settled)
    try:
        return await Following(client, ids, watcher, over=over).run()
    except asyncio.CancelledError:
        return None


def _let_go(ids: Sequence[str]) -> int:
    each = " ".join(operation_text.short_id(one) for one in ids)
    remark("Let go of it; the fleet goes on with it.")
    remark(f"`corral ops watch {each}` follows it again, `corral ops cancel {each}` stops it.")
    return UNDER_WAY


def _shown(ids: Sequence[str], stack: ExitStack) -> Watcher:
    screen = console()
    if not sys.stdout.isatty() or screen.is_dumb_terminal:
        return OnLines(several=len(ids) > 1)
    from rich.live import Live

    return OnScreen(stack.enter_context(Live(console=screen, auto_refresh=False)))


class Silent:
    def see(self, view: OperationView) -> None:
        pass

    def lost(self, reason: str) -> None:
        pass

    def found(self) -> None:
        pass


class JsonLines(Silent):
    def __init__(self) -> None:
        self._last: dict[str, OperationView] = {}

    def see(self, view: OperationView) -> None:
        if self._last.get(view.job_id) != view:
            self._last[view.job_id] = view
            print_json(view, indent=None)


class OnLines(Silent):
    def __init__(self, *, several: bool) -> None:
        self._lines = operation_board.Lines(several=several)
        self._lost = False

    def see(self, view: OperationView) -> None:
        for line in self._lines.new(view):
            tell(line)

    def lost(self, reason: str) -> None:
        if not self._lost:  # once; that it goes on is seen by the next line
            self._lost = True
            complain(f"no news ({reason}); going on as soon as there are")

    def found(self) -> None:
        self._lost = False


class OnScreen:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._views: dict[str, OperationView] = {}
        self._trouble = ""

    def see(self, view: OperationView) -> None:
        self._views[view.job_id] = view
        self._draw()

    def lost(self, reason: str) -> None:
        self._trouble = reason
        self._draw()

    def found(self) -> None:
        self._trouble = ""

    def _draw(self) -> None:
        room = max(1, min(operation_board.MANY, self._live.console.size.height - 3))
        shown = operation_board.screen(list(self._views.values()), most=room, trouble=self._trouble)
        self._live.update(shown, refresh=True)
