"""A conversation on a terminal: lines with editing and a history, commands such as `/reset`, answers wrapped at words.

Readline is used only where stdin and stdout are both a terminal: elsewhere it would write its prompt into the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from rich.cells import cell_len

from corral.cli.common.output import print_note
from corral.kit.tasks import wait_readable

MAX_HISTORY = 1000  # lines
HELP = """/model NAME   talk to another model; without NAME: which one answers now
/reset        forget the conversation so far
/save FILE    write the conversation into a file
/help         this list
//text        a prompt that begins with a slash
Ctrl-C stops an answer; at the prompt, Ctrl-C and Ctrl-D end the conversation."""
COMMANDS = ("/help", "/model", "/reset", "/save")
_WORD = re.compile(r"\s+|\S+")
_FENCE = ("```", "~~~")
_REPEAT_S = 0.05


def parse_command(line: str) -> tuple[str, str] | None:
    """`/save notes.md` → its name and its argument; None for a prompt. Pure."""
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, argument = line.partition(" ")
    return name, argument.strip()


def prompt_of(line: str) -> str:
    return line[1:] if line.startswith("//") else line


class WordWrap:
    """Breaks a text that arrives in pieces at words. Lines of code, between fences, stay as they are. Pure."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._line_begin = ""  # of the present line, to recognise a fence
        self._blank = ""  # before the word that is arriving
        self._word = ""
        self._is_code = False

    def feed(self, text: str) -> str:
        """What can be printed now; a word once it is complete."""
        shown = []
        for line in text.splitlines(keepends=True):
            for piece in _WORD.findall(line.rstrip("\n")):
                shown.append(self._take(piece))
            if line.endswith("\n"):
                shown += [self.flush(), self._end_line()]
        return "".join(shown)

    def flush(self) -> str:
        """The word that was still arriving."""
        if not self._word:
            return ""
        word, self._word = self._word, ""
        blank, self._blank = self._blank, ""
        size = cell_len(blank) + cell_len(word)
        if self._column and not self._is_code and self._column + size > self._width:
            self._column = cell_len(word)
            return f"\n{word}"
        self._column += size
        return blank + word

    def _take(self, piece: str) -> str:
        if len(self._line_begin) < 3:
            self._line_begin += piece.lstrip()
        if piece.isspace():
            shown = self.flush()
            self._blank += piece
            return shown
        self._word += piece
        return ""

    def _end_line(self) -> str:
        if self._line_begin.startswith(_FENCE):
            self._is_code = not self._is_code
        self._column, self._line_begin, self._blank = 0, "", ""
        return "\n"


def history_file(env: Mapping[str, str]) -> Path:
    state = env.get("XDG_STATE_HOME") or str(Path(env.get("HOME") or Path.home()) / ".local" / "state")
    return Path(state) / "corral" / "chat-history"


class LineReader:
    """Reads what a person types. `history`: the file of earlier lines; None keeps none."""

    def __init__(self, history: Path | None) -> None:
        self._history = history
        self._readline = _find_readline()
        self._lines = _read_history(history)
        if self._readline is not None:
            self._readline.clear_history()
            self._readline.set_auto_history(False)
            for line in self._lines:
                self._readline.add_history(line)

    async def read(self, prompt: str) -> str:
        """Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        line = await _read_plain(prompt) if self._readline is None else await _read_edited(prompt)
        if line.strip():
            self._remember(" ".join(line.split("\n")).strip())  # pasted lines are one prompt
        return line

    def _remember(self, line: str) -> None:
        if self._lines[-1:] == [line]:
            return
        self._lines = [*self._lines, line][-MAX_HISTORY:]
        if self._readline is not None:
            self._readline.add_history(line)
        if self._history is not None:
            try:
                _write_history(self._history, self._lines)
            except OSError as error:
                print_note(f"(the history cannot be kept in {self._history}: {error.strerror})")
                self._history = None


def _find_readline() -> ModuleType | None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    try:
        import readline
    except ImportError:  # a Python that was built without it
        return None
    return readline


async def _read_edited(prompt: str) -> str:
    """Blocks: nothing else happens while a person types. asyncio's handler of Ctrl-C would not end it."""
    with _interruptible():
        await asyncio.sleep(0)  # ends here if Ctrl-C came before: asyncio's handler has cancelled the command
        return input(prompt)  # noqa: ASYNC250 - nothing else is to happen meanwhile


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, once. Python's readline looks for signals only when one interrupts its wait for
    a key: one that arrives just before the wait would be noticed at the next key. So a thread repeats it until it is.
    """
    is_raised = False
    main = threading.get_ident()

    def interrupt(*_: object) -> None:
        nonlocal is_raised
        if not is_raised:
            is_raised = True
            raise KeyboardInterrupt

    def repeat(signals: socket.socket) -> None:
        while True:
            try:
                arrived = signals.recv(64)
            except TimeoutError:
                signal.pthread_kill(main, signal.SIGINT)
                continue
            if not arrived:  # the wait is over
                return
            if signal.SIGINT in arrived:
                signals.settimeout(_REPEAT_S)

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    repeating = threading.Thread(target=repeat, args=(ours,), name="repeat Ctrl-C", daemon=True)
    repeating.start()
    handler = signal.getsignal(signal.SIGINT)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        signal.signal(signal.SIGINT, interrupt)
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        theirs.close()
        repeating.join()
        ours.close()
        signal.signal(signal.SIGINT, handler)


async def _read_plain(prompt: str) -> str:
    """Without a thread: one that waits for input cannot be stopped, and Ctrl-C would have no effect."""
    print(prompt, end="", file=sys.stderr, flush=True)
    terminal, typed = sys.stdin.fileno(), b""
    while not typed.endswith(b"\n"):
        await wait_readable(terminal)
        piece = os.read(terminal, 65536)
        if not piece and not typed:
            raise EOFError
        if not piece:  # Ctrl-D after some text ends the line
            break
        typed += piece
    return typed.decode(errors="replace")


def _read_history(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return path.read_text(errors="replace").splitlines()[-MAX_HISTORY:]
    except OSError:
        return []


def _write_history(path: Path, lines: list[str]) -> None:
    """For this user only: prompts are nobody else's business. The file appears whole, also if two conversations write
    it at once."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _new_private_file(path.with_name(f"{path.name}.{os.getpid()}")) as new:
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(path)


@contextlib.contextmanager
def _new_private_file(path: Path) -> Iterator[Path]:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def save_conversation(path: Path, messages: list[dict[str, str]]) -> None:
    """As Markdown. Never overwrites a file."""
    with path.expanduser().open("x") as file:
        for message in messages:
            file.write(f"## {message['role']}\n\n{message['content'].strip()}\n\n")
