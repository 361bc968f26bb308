"""docs/tutorial.md is typed command by command on an empty machine, with a real engine and a real model."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.processes import Process, clean_env, free_port
from tests.support.waiting import wait_for

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
_BLOCK = re.compile(r"(?:<!-- (?P<remark>[^>]*?) -->\n)?```\n(?P<text>.*?)```", re.DOTALL)
_SECRETS = {prefix: re.compile(rf"{prefix}[a-z2-7]{{20,}}") for prefix in ("cj_", "ck_")}


@dataclass(frozen=True)
class Step:
    command: str
    output: tuple[str, ...]
    remark: str = ""


def steps(page: str) -> Iterator[Step]:
    for block in _BLOCK.finditer(page):
        for part in re.split(r"^\$ ", block["text"], flags=re.MULTILINE)[1:]:
            command, *output = part.rstrip("\n").split("\n")
            yield Step(command, tuple(output), block["remark"] or "")


def pattern(output: tuple[str, ...]) -> re.Pattern[str]:
    """`…` is anything on a line, and a line of its own is any lines, also none."""
    parts = []
    for line in output:
        if line == "…":
            parts.append(r"(?:.*\n)*?")
        else:
            # The width of a column depends on its cells.
            words = ".*".join(re.sub(r"(?:\\ ){2,}", r"\\ +", re.escape(each)) for each in line.split("…"))
            parts.append(rf"{words}\s*?\n")
    return re.compile("".join(parts))


@pytest.mark.parametrize(
    ("expected", "printed", "is_same"),
    [
        (("a …c",), "a b c\n", True),
        (("a …c",), "a b d\n", False),
        (("a", "…", "z"), "a\nb\nc\nz\n", True),
        (("a", "…", "z"), "a\nz\n", True),
        (("a", "z"), "a\nb\nz\n", False),
        (("N  S",), "N      S   \n", True),
        (("1+1 (x)",), "1+1 (x)\n", True),
        ((), "something\n", False),
    ],
)
def test_what_is_the_same_output(expected: tuple[str, ...], printed: str, is_same: bool) -> None:
    assert (pattern(expected).fullmatch(printed) is not None) == is_same


def test_blocks_become_steps() -> None:
    found = list(steps("<!-- terminal: x -->\n```\n$ one\na\nb\n$ two\n```\n\n```\n$ three\n```\n"))
    assert found == [Step("one", ("a", "b"), "terminal: x"), Step("two", (), "terminal: x"), Step("three", ())]


@dataclass
class Machine:
    """A home without anything in it. What a person pastes from earlier output is remembered."""

    root: Path
    port: int = field(default_factory=free_port)
    terminals: dict[str, Process] = field(default_factory=dict)
    pasted: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        home, bin = self.root / "home", self.root / "bin"
        home.mkdir()
        bin.mkdir()
        launcher = bin / "corral"
        launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m corral.cli.main "$@"\n')
        launcher.chmod(0o755)
        # Only the list of models that comes with Corral: no test depends on somebody else's.
        lists = {"CORRAL_GALLERIES": "[]", "CORRAL_MODEL_GALLERIES": "[]"}
        self.env = clean_env(home, **lists)
        self.env["PATH"] = f"{bin}:{self.env['PATH']}"

    def command(self, step: Step) -> str:
        """With ports that are free here, and with what was printed before in place of `cj_…` and `ck_…`."""
        text = step.command.replace(":8080", f":{self.port}")
        for prefix, value in self.pasted.items():
            text = text.replace(f"{prefix}…", value)
        return text

    def type(self, step: Step) -> None:
        command = self.command(step)
        if step.remark.startswith("terminal: "):
            ports = {"CORRAL_PORT": self.port} if command == "corral up" else {}
            ports |= {f"CORRAL_{name}_PORT": free_port() for name in ("BUS", "BLOB", "INGRESS")} if ports else {}
            env = {**self.env, **{name: str(port) for name, port in ports.items()}}
            name = step.remark.removeprefix("terminal: ")
            terminal = Process(["/bin/sh", "-c", f"exec {command}"], env, self.root / f"{name}.log")
            self.terminals[name] = terminal
            wait_for(lambda: self.is_as_shown(step, terminal.output(), is_whole=False), f"output of {command}", 90)
        elif step.remark == "until it is so":
            wait_for(lambda: self.is_as_shown(step, self.run(command)), f"output of {command}", 180)
        else:
            printed = self.run(command)
            assert self.is_as_shown(step, printed), f"$ {command}\n{printed}\nis not\n" + "\n".join(step.output)

    def run(self, command: str) -> str:
        """stderr first: notes and results are two streams, and a terminal shows them as they come."""
        ran = subprocess.run(
            ["/bin/sh", "-c", command],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, f"$ {command}\n{ran.stdout}"
        for prefix, form in _SECRETS.items():
            if (found := form.search(ran.stdout)) is not None:
                self.pasted[prefix] = found[0]
        return ran.stdout

    def is_as_shown(self, step: Step, printed: str, *, is_whole: bool = True) -> bool:
        shown = printed.replace(f":{self.port}", ":8080")
        shown = shown if shown.endswith("\n") or not shown else f"{shown}\n"
        expected = pattern(step.output)
        return (expected.fullmatch(shown) if is_whole else expected.search(shown)) is not None

    def close(self) -> None:
        for terminal in reversed(self.terminals.values()):
            terminal.close()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_command_of_the_tutorial_prints_what_the_page_shows(tmp_path: Path) -> None:
    assert shutil.which("curl"), "the tutorial uses curl"
    page = [step for step in steps(PAGE.read_text()) if not step.remark.startswith("not run")]
    assert len(page) > 15
    machine = Machine(tmp_path)
    try:
        for step in page:
            machine.type(step)
        for name in ("byre", "barn", "fleet"):  # Ctrl-C, as the page says
            assert machine.terminals[name].stop() == 0
    finally:
        machine.close()
