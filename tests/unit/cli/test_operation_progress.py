"""Bars for a terminal, lines for a file: what is shown of few nodes and of a thousand."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from corral.cli.operations import progress as board
from corral.contract.admin import OperationView
from tests.support.operation_views import OPERATION, on, operation


def drawn(*views: OperationView, max_rows: int = 20, problem: str = "", width: int = 120) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=False, highlight=False)
    console.print(board.screen(views, max_rows=max_rows, problem=problem))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_bar_per_node() -> None:
    view = operation(
        on(
            "attic",
            phase="downloading",
            percentage=50.0,
            current_bytes=1024,
            total_bytes=2048,
            rate=512.0,
            file_name="f",
        ),
        on("shed", "queued", error="node offline, will retry when healthy", waits=True),
        on("barn", "success", percentage=100.0, version="1.1"),
        on("cellar", "error", error="disk full"),
    )
    assert board.bars([view]) == [
        board.Bar("attic", 50.0, "downloading", "1.0 KiB / 2.0 KiB", "512 B/s", "f"),
        board.Bar("shed", None, "queued", note="node offline, will retry when healthy", style="yellow"),
        board.Bar("barn", 100.0, "success", note="1.1", style="green"),
        board.Bar("cellar", None, "error", note="disk full; no automatic retry", style="red"),
    ]
    lines = drawn(view)
    assert lines[0] == "install vllm on every node: 1 of 4 done, 1 failing, 1 waiting"
    assert lines[1].startswith("attic   ━━━━━━━━━━━━")
    assert "50%" in lines[1]
    assert len(lines) == 5


def test_of_several_operations_each_bar_says_whose_it_is() -> None:
    views = [operation(on("attic")), operation(on("attic"), job_id="op-2", backend="mock")]
    assert [bar.name for bar in board.bars(views)] == ["vllm attic", "mock attic"]
    assert len(drawn(*views)) == 4


def a_thousand() -> OperationView:
    nodes = [on(f"n{number:04}", "success", percentage=100.0) for number in range(900)]
    nodes += [on(f"n{number:04}", phase="downloading", percentage=30.0) for number in range(900, 970)]
    nodes += [on(f"n{number:04}", "queued", waits=True) for number in range(970, 997)]
    nodes += [on(f"n{number:04}", "error", error="disk full") for number in range(997, 1000)]
    return operation(*nodes, progress=92)


def test_a_thousand_nodes_are_one_bar_and_those_that_fail_or_move() -> None:
    bars = board.bars([a_thousand()], max_rows=10)
    assert bars[0] == board.Bar("install vllm on every node", 92.0, "", note="900 of 1000 done, 3 failing, 27 waiting")
    assert [bar.name.strip() for bar in bars[1:5]] == ["n0997", "n0998", "n0999", "n0900"]
    assert bars[-1].name == "  and 64 more in progress or failing"
    assert len(drawn(a_thousand(), max_rows=10)) == 11


def test_a_low_terminal_counts_as_many_nodes() -> None:
    view = operation(*(on(f"n{number}", percentage=1.0) for number in range(12)), progress=1)
    assert len(board.bars([view])) == 12
    assert len(board.bars([view], max_rows=8)) == 9
    assert len(board.bars([view], max_rows=1)) == 3  # the whole, one node, and how many more


def test_long_words_do_not_break_a_line_in_two() -> None:
    view = operation(on("attic", "error", error="why " * 100))
    assert len(drawn(view, width=80)) == 2


def test_names_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in "".join(drawn(operation(on("at\x1b[2Jtic", "error", error="\x1b]0;x\x07"))))


def test_trouble_is_shown_below_what_was_last_known() -> None:
    assert drawn(operation(on("attic")), problem="nothing answers")[-1].startswith(
        "lost the connection to the fleet (nothing answers)"
    )


def test_lines_tell_only_what_is_new() -> None:
    lines = board.ProgressLines()
    start = operation(on("attic", phase="downloading", percentage=1.0), on("shed", "queued", waits=True))
    assert list(lines.new(start)) == [
        f"install vllm on every node ({OPERATION})",
        "attic: downloading 1%",
        "shed: queued",
    ]
    assert list(lines.new(start)) == []
    further = operation(on("attic", phase="downloading", percentage=24.0), on("shed", "queued", waits=True))
    assert list(lines.new(further)) == []
    quarter = operation(on("attic", phase="downloading", percentage=26.0), on("shed", "queued", waits=True))
    assert list(lines.new(quarter)) == ["attic: downloading 26%"]
    phase = operation(on("attic", phase="extracting", percentage=30.0), on("shed", "queued", waits=True))
    assert list(lines.new(phase)) == ["attic: extracting 30%"]


def test_lines_of_several_operations_name_the_backend() -> None:
    lines = board.ProgressLines(several=True)
    assert list(lines.new(operation(on("attic", "success"))))[1:] == ["vllm attic: success"]


def test_a_thousand_nodes_are_a_line_per_tenth_and_the_first_failures() -> None:
    lines = board.ProgressLines()
    first = list(lines.new(a_thousand()))
    assert first[0] == f"install vllm on every node ({OPERATION})"
    assert [line.partition(":")[0] for line in first[1:-1]] == ["n0997", "n0998", "n0999"]
    assert first[-1] == "92%: 900 of 1000 done, 3 failing, 27 waiting"
    assert list(lines.new(a_thousand())) == []
    everybody = operation(*(on(f"n{number:04}", "error", error="disk full") for number in range(1000)), progress=3)
    assert len(list(lines.new(everybody))) == board.MAX_BARS - 3 + 1


def test_on_a_narrow_terminal_the_bar_gives_way_and_not_the_numbers() -> None:
    full: dict[str, Any] = {
        "percentage": 100.0,
        "phase": "extracting",
        "current_bytes": 33_000_000,
        "total_bytes": 33_900_000,
    }
    narrow = Console(file=StringIO(), width=80, force_terminal=True, color_system=None)
    with narrow.capture() as drawn:
        narrow.print(board.screen([operation(on("workstation", rate=4.5e6, file_name="x" * 60, **full))]))
    line = drawn.get().splitlines()[1]
    assert line.startswith("workstation ")
    assert "100%  extracting  31.5 MiB / 32.3 MiB" in line
    assert len(line) <= 80
