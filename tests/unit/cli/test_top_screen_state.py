"""What keys of `corral top` do, and what the screen shows then."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from corral.cli.top.frame import draw
from corral.cli.top.screen_state import (
    VIEWS,
    Act,
    CloseText,
    Command,
    Explain,
    FollowLog,
    ListLogs,
    Quit,
    ScreenState,
    TextPanel,
    help_lines,
)
from corral.cli.top.state import FleetState
from corral.contract.admin import NodeView, OperationView

NOW = datetime(2026, 11, 19, 12, 0, tzinfo=UTC)
PAGE = 10


@pytest.fixture
def fleet() -> FleetState:
    fleet = FleetState(key_name="notebook", role="admin")
    for name, status in (("attic", "healthy"), ("barn", "draining"), ("cellar", "pending"), ("dairy", "offline")):
        put_node(fleet, name, status)
    view = {"jobID": "0badcafe-1", "kind": "install", "backend": "vllm", "scope": "all", "state": "failing"}
    fleet.operations.put("0badcafe-1", msgspec.convert(view, OperationView))
    fleet.models = ()
    fleet.replicas = ({"model_name": "tiny", "node_name": "attic", "replica_index": 1, "state": "loaded"},)
    return fleet


def put_node(fleet: FleetState, name: str, status: str, **more: Any) -> None:
    fleet.nodes.put(name, msgspec.convert({"id": name, "name": name, "status": status, **more}, NodeView))


def press(screen: ScreenState, fleet: FleetState, *keys: str) -> Command | None:
    command = None
    for key in keys:
        character = {"slash": "/", "space": " "}.get(key, key if len(key) == 1 else "")
        command = screen.on_key(key, character, fleet, page=PAGE, width=80)
    return command


def text(screen: ScreenState, fleet: FleetState, width: int = 80, height: int = 24) -> list[str]:
    lines = draw(fleet, screen, width, height, NOW)
    return ["".join(span.text for span in line) for line in lines]


def chosen(screen: ScreenState, fleet: FleetState) -> str:
    """The reversed line of the table."""
    lines = draw(fleet, screen, 80, 24, NOW)[2:-2]
    (line,) = [line for line in lines if line[0].style == "reverse"]
    return line[0].text.split()[0]


def test_views_are_reached_by_number_and_in_turn(fleet: FleetState) -> None:
    screen = ScreenState()
    for number, view in enumerate(VIEWS, 1):
        press(screen, fleet, str(number))
        assert screen.view == view
    press(screen, fleet, "tab")
    assert screen.view == "overview"
    press(screen, fleet, "shift+tab", "left")
    assert screen.view == "requests"
    press(screen, fleet, "7")
    assert screen.view == "requests"


def test_the_cursor_stays_with_its_row(fleet: FleetState) -> None:
    screen = ScreenState(view="nodes")
    assert chosen(screen, fleet) == "cellar", "pending nodes are first"
    press(screen, fleet, "down")
    assert chosen(screen, fleet) == "dairy"
    put_node(fleet, "dairy", "healthy")
    assert chosen(screen, fleet) == "dairy"
    fleet.nodes.remove("dairy")
    assert chosen(screen, fleet) == "attic", "the last row takes the place of one that is gone"
    press(screen, fleet, "home")
    put_node(fleet, "aaa", "pending")
    assert chosen(screen, fleet) == "aaa", "at the top the cursor stays at the top"
    press(screen, fleet, "end", "down", "pagedown")
    assert chosen(screen, fleet) == "attic"


@pytest.mark.parametrize(
    ("rows", "keys", "command"),
    [
        (0, "a", Act("approve", "cellar", "cellar", "Approve cellar: it may run models?")),
        (2, "d", Act("resume", "barn", "barn")),
        (3, "d", Act("drain", "attic", "attic", "Drain attic: no new replicas start there?")),
        (3, "w", Explain("node", "attic", "attic")),
        (3, "enter", Explain("node", "attic", "attic")),
        (3, "l", ListLogs("attic")),
    ],
)
def test_keys_of_a_node(fleet: FleetState, rows: int, keys: str, command: Act | Explain | ListLogs) -> None:
    screen = ScreenState(view="nodes")
    done = press(screen, fleet, *["down"] * rows, keys)
    if isinstance(command, Act) and command.question:
        assert done is None
        assert text(screen, fleet)[-2].startswith(f"{command.question} [y/N]")
        done = press(screen, fleet, "y")
    assert done == command


@pytest.mark.parametrize(("rows", "key", "why"), [(3, "a", "only pending"), (1, "d", "only healthy and unhealthy")])
def test_what_a_node_is_not_ready_for_is_said(fleet: FleetState, rows: int, key: str, why: str) -> None:
    screen = ScreenState(view="nodes")
    assert press(screen, fleet, *["down"] * rows, key) is None
    assert screen.unconfirmed is None
    assert why in text(screen, fleet)[-2]


def test_everything_but_yes_is_no(fleet: FleetState) -> None:
    for key in ("n", "enter", "escape", "d", "q"):
        screen = ScreenState(view="operations")
        assert press(screen, fleet, "c", key) is None
        assert "Nothing was changed." in text(screen, fleet)[-2]


def test_keys_of_an_operation(fleet: FleetState) -> None:
    screen = ScreenState(view="operations")
    name = "install vllm (0badcafe)"
    assert press(screen, fleet, "r") == Act("retry", "0badcafe-1", name)
    assert press(screen, fleet, "w") == Explain("operation", "0badcafe-1", name)
    done = press(screen, fleet, "escape", "c", "y")
    assert isinstance(done, Act)
    assert (done.kind, done.id) == ("cancel", "0badcafe-1")


def test_keys_of_a_replica(fleet: FleetState) -> None:
    screen = ScreenState(view="models")
    assert press(screen, fleet, "l") == FollowLog("tiny#1", "attic")
    assert press(screen, fleet, "w") == Explain("model", "tiny", "tiny")


@pytest.mark.parametrize(("view", "key"), [("nodes", "d"), ("nodes", "a"), ("operations", "r"), ("operations", "c")])
def test_a_viewer_cannot_act(fleet: FleetState, view: str, key: str) -> None:
    fleet.role = "viewer"
    screen = ScreenState(view=view)
    assert press(screen, fleet, key) is None
    assert screen.unconfirmed is None
    lines = text(screen, fleet)
    assert "only keys of admins change the fleet" in lines[-2]
    assert not {"d drain", "a approve", "r retry", "c cancel"} & {word for word in lines[-1].split("   ")}


def test_a_filter_is_typed_kept_and_removed(fleet: FleetState) -> None:
    screen = ScreenState(view="nodes")
    press(screen, fleet, "slash", "q", "d", "backspace", "backspace", "a", "i", "r")
    assert text(screen, fleet)[-2].startswith("filter: air_"), "letters are no commands now"
    assert [row.key for row in screen.rows(fleet)] == ["dairy"]
    press(screen, fleet, "enter")
    assert text(screen, fleet)[-2].startswith("filter: air   (Esc removes it)")
    press(screen, fleet, "slash", "x")
    assert "No row contains 'airx'." in "\n".join(text(screen, fleet))
    press(screen, fleet, "escape")
    assert len(screen.rows(fleet)) == 4


def test_a_text_is_scrolled_filtered_and_closed(fleet: FleetState) -> None:
    screen = ScreenState(view="nodes", text=TextPanel("node attic", [f"line {at}" for at in range(100)]))
    assert text(screen, fleet)[2].strip() == "line 0"
    press(screen, fleet, "pagedown", "down")
    assert text(screen, fleet)[2].strip() == "line 11"
    press(screen, fleet, "slash", "9", "9", "enter")
    assert text(screen, fleet)[2:4] == [f"{'line 99':80}", " " * 80]
    assert press(screen, fleet, "escape") == CloseText()
    assert screen.view == "nodes"
    assert press(screen, fleet, "q") == Quit()


def test_a_log_shows_its_end_until_somebody_scrolls_up(fleet: FleetState) -> None:
    panel = TextPanel("log tiny on attic", follows=True)
    screen = ScreenState(text=panel)
    panel.append([f"line {at}" for at in range(100)])
    assert text(screen, fleet)[-3].strip() == "line 99"
    panel.append(["line 100"])
    assert text(screen, fleet)[-3].strip() == "line 100"
    screen.on_key("up", "", fleet, page=20, width=80)
    panel.append(["line 101"])
    assert text(screen, fleet)[-3].strip() == "line 99"
    screen.on_key("end", "", fleet, page=20, width=80)
    assert text(screen, fleet)[-3].strip() == "line 101"


def test_a_log_does_not_grow_without_end() -> None:
    panel = TextPanel("log tiny on attic", follows=True)
    for _ in range(30):
        panel.append(["x"] * 100)
    assert len(panel.lines) == 2000


def test_long_lines_are_wrapped_below_their_value() -> None:
    panel = TextPanel("node attic", ["backend fix  " + "word " * 10])
    assert panel.shown(40) == ["backend fix  word word word word word", "             word word word word word"]


def test_help_fits_eighty_columns() -> None:
    assert max(map(len, help_lines())) <= 80
    assert len(help_lines()) <= 20, "without scrolling in 24 lines"


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (200, 60), (20, 5)])
@pytest.mark.parametrize("view", VIEWS)
def test_every_screen_is_exactly_as_large_as_the_terminal(fleet: FleetState, view: str, size: tuple[int, int]) -> None:
    width, height = size
    shown = text(ScreenState(view=view), fleet, width, height)
    assert len(shown) == height
    assert {len(line) for line in shown} == {width}


def test_a_lost_connection_is_told(fleet: FleetState) -> None:
    fleet.problem = "lost the connection (refused); retrying"
    assert text(ScreenState(), fleet)[-2].startswith("! lost the connection (refused)")
