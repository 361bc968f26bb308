"""A real terminal: a command in tmux, the keys that a person presses, and what the screen shows.

with terminal(tmp_path, 80, 24, "corral", "top", env=env) as screen:
    screen.press("2")
    screen.wait_for("NAME")
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_for


class Terminal:
    def __init__(self, socket: Path, width: int, height: int) -> None:
        self._socket = socket
        self._status = socket.with_name("status")
        self.width, self.height = width, height

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *words]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if ran.returncode:
            raise AssertionError(f"{shlex.join(command)}: {ran.stderr}")
        return ran.stdout

    def press(self, *keys: str) -> None:
        """Names of tmux (`Down`, `Enter`, `Escape`), or characters."""
        for key in keys:
            self.tmux("send-keys", "-t", "corral", key)

    def lines(self) -> list[str]:
        return self.tmux("capture-pane", "-p", "-t", "corral").rstrip("\n").split("\n")

    def text(self) -> str:
        return "\n".join(self.lines())

    def codes(self) -> str:
        """The screen with the escape sequences that made it."""
        return self.tmux("capture-pane", "-p", "-e", "-t", "corral")

    def wait_for(self, *words: str, gone: str = "") -> str:
        """The screen once it contains all the words, and no longer what is to be gone."""

        def look() -> str:
            text = self.text()
            assert [word for word in words if word not in text] == [], f"\n{text}"
            assert not gone or gone not in text, f"\n{text}"
            return text

        return wait_for(look, f"screen with {words}{f' without {gone!r}' if gone else ''}")

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.tmux("resize-window", "-t", "corral", "-x", str(width), "-y", str(height))

    def exit_status(self) -> int:
        """Of the command, once it has ended."""
        return int(wait_for(self._status.read_text, "end of the command"))

    def process(self) -> psutil.Process:
        """The command itself, which is the child of a shell."""
        shell = psutil.Process(int(self.tmux("display-message", "-p", "-t", "corral", "#{pane_pid}")))
        (command,) = shell.children()
        return command


@contextlib.contextmanager
def terminal(
    folder: Path, width: int, height: int, *command: str, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux (Debian package tmux)")
    shown = Terminal(folder / "tmux", width, height)
    inner = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **(env or {})}
    words = shlex.join(["env", "-i", f"TERM={inner.pop('TERM', 'screen')}", *(f"{k}={v}" for k, v in inner.items())])
    # tmux knows the exit status of a command not always, so a shell writes it down.
    run = f"{words} {shlex.join(command)}; echo $? >{shlex.quote(str(folder / 'status.new'))}"
    run += f"; mv {shlex.quote(str(folder / 'status.new'))} {shlex.quote(str(folder / 'status'))}"
    with_env = ("new-session", "-d", "-s", "corral", "-x", str(width), "-y", str(height), run)
    shown.tmux("set-option", "-g", "remain-on-exit", "on", ";", *with_env)
    server = int(shown.tmux("display-message", "-p", "#{pid}"))
    try:
        yield shown
    finally:
        with contextlib.suppress(AssertionError):  # it ends by itself after the last session
            shown.tmux("kill-server")
        wait_for(lambda: not psutil.pid_exists(server), "end of tmux")
