"""The terminal of `corral top`: Textual gives keys, sizes and a screen; what stands on it comes from `frame.py`.

One widget draws everything, line by line, and only lines that differ are sent to the terminal: over a slow connection
a fleet in motion costs little, and a thousand nodes cost no more than the rows that fit.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from corral.cli.common.output import log_line
from corral.cli.top import details, frame
from corral.cli.top.feed import FleetFeed
from corral.cli.top.screen_state import (
    Act,
    CloseText,
    Command,
    Explain,
    FollowLog,
    ListLogs,
    Quit,
    ScreenState,
    TextPanel,
    log_title,
)
from corral.kit.errors import CorralError

if TYPE_CHECKING:
    from corral.cli.top.state import FleetState
    from corral.client import Client

_DRAW_S = 0.5  # while the fleet moves
_IDLE_S = 1.0  # otherwise: times such as `5s ago` move
_LOG_TAIL = 200
_MIN_COLORS = 8


class Canvas(Widget, can_focus=True):
    def __init__(self) -> None:
        super().__init__()
        self._lines: list[frame.Line] = []

    def show(self, lines: list[frame.Line]) -> None:
        """Repaint the lines that changed."""
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.refresh()
            return
        changed = [at for at, line in enumerate(lines) if before[at] != line]
        if changed:
            self.refresh(*(Region(0, at, self.size.width, 1) for at in changed))

    def render_line(self, y: int) -> Strip:
        if y >= len(self._lines):
            return Strip.blank(self.size.width)
        return Strip([Segment(span.text, Style.parse(span.style)) for span in self._lines[y]])


class TopApp(App[None]):
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; overflow: hidden; }
    Canvas { width: 100%; height: 100%; background: ansi_default; color: ansi_default; }
    """
    BINDINGS: ClassVar = []

    def __init__(self, client: Client, fleet: FleetState) -> None:
        if _has_no_colors():
            os.environ["NO_COLOR"] = "1"  # what Textual reads
        super().__init__(ansi_color=True)  # the terminal's own colours, light or dark
        self._client = client
        self._fleet = fleet
        self._state = ScreenState()
        self._canvas = Canvas()
        self._feed = FleetFeed(client, fleet, view=lambda: self._state.view, on_change=self._on_fleet_change)
        self._fleet_moves = True
        self._drawn_at = 0.0
        self._log_task: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    def compose(self) -> ComposeResult:
        yield self._canvas

    def on_mount(self) -> None:
        self._canvas.focus()
        self.run_worker(self._feed.run(), name="feed")
        self.set_interval(_DRAW_S, self._draw_if_due)

    async def on_unmount(self) -> None:
        running = [*self._background, *([self._log_task] if self._log_task else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._draw)

    async def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        view = self._state.view
        page = frame.page_height("" if self._state.text else view, self.size.height)
        command = self._state.on_key(event.key, event.character or "", self._fleet, page=page, width=self.size.width)
        if command is not None:
            self._run_command(command)
        if self._state.view != view:
            self._feed.wake()
        self._draw()

    def _run_command(self, command: Command) -> None:
        match command:
            case Quit():
                self.exit()
            case Act():
                self._start(self._act(command))
            case Explain():
                self._state.text = TextPanel(f"{command.kind} {command.name}", ["Loading …"])
                self._start(self._explain(command, self._state.text))
            case FollowLog():
                self._state.text = TextPanel(log_title(command), follows=True)
                self._log_task = asyncio.create_task(self._follow_log(command, self._state.text))
            case ListLogs():
                self._start(self._list_logs(command))
            case CloseText():
                if self._log_task is not None:
                    self._log_task.cancel()

    def _start(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _act(self, requested: Act) -> None:
        try:
            self._state.message = await details.act(self._client, requested)
        except CorralError as error:
            self._state.message = f"{requested.kind} failed: {error.message}"
        self._feed.wake()
        self._draw()

    async def _explain(self, requested: Explain, panel: TextPanel) -> None:
        try:
            panel.lines = await details.explain(self._client, self._fleet, requested, self.size.width)
        except CorralError as error:
            panel.lines = [error.message]
        self._draw()

    async def _list_logs(self, requested: ListLogs) -> None:
        try:
            names = await self._client.logs.names(requested.node)
            self._fleet.node_logs = {**self._fleet.node_logs, requested.node: names}
            if not names:
                self._state.message = f"{requested.node} has no logs of backends."
        except CorralError as error:
            self._state.message = error.message
        self._draw()

    async def _follow_log(self, requested: FollowLog, panel: TextPanel) -> None:
        try:
            async with aclosing(self._client.logs.follow(requested.node, requested.name, _LOG_TAIL)) as lines:
                async for line in lines:
                    panel.append([log_line(line, timed=not requested.name)])
                    self._fleet_moves = True
            panel.append(["(the log has ended)"])
        except CorralError as error:
            panel.append([f"({error.message})"])
        self._draw()

    def _on_fleet_change(self) -> None:
        self._fleet_moves = True

    def _draw_if_due(self) -> None:
        if self._fleet_moves or asyncio.get_running_loop().time() - self._drawn_at >= _IDLE_S:
            self._draw()

    def _draw(self) -> None:
        self._fleet_moves = False
        self._drawn_at = asyncio.get_running_loop().time()
        width, height = self.size
        self._canvas.show(frame.draw(self._fleet, self._state, width, height, datetime.now(UTC)))


def _has_no_colors() -> bool:
    """A terminal such as vt100 would show the codes of colours, or ignore them."""
    import curses

    try:
        curses.setupterm()
        return curses.tigetnum("colors") < _MIN_COLORS
    except curses.error:  # not in the terminal database: most of those have colours
        return False
