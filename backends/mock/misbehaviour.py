"""What the mock does wrong, on request.

Said in three ways, each stronger than the one before: the environment (`MOCK_CRASH_AFTER=3`), the model's options
(`crash_after:3`), and the prompt itself (`[[crash_after=3]] hello`), so that a test far away, behind a gateway, can ask
for it too.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

_SAID = re.compile(r"\[\[(\w+)(?:=([^\]]*))?\]\]\s*")


@dataclass(frozen=True)
class Misbehaviour:
    # at start
    start_delay_s: float = 0.0  # before it listens
    start_lines: int = 0  # lines on stderr before anything else
    crash_at_start: int = 0  # exit code, after those lines
    silent: bool = False  # never listens, never says anything
    ignore_sigterm: bool = False
    grandchildren: int = 0  # processes it leaves running, the last one in a session of its own
    # at load
    load_delay_s: float = 0.0
    load_fails: str = ""  # the reason
    identity: str = ""  # claims to be this model
    # at work
    first_delay_s: float = 0.0  # before anything is answered, as while a long prompt is read
    piece_delay_s: float = 0.0
    until_file: str = ""  # after the first piece nothing more until this file exists
    busy: bool = False
    hang: bool = False  # never answers, never breaks off
    tool: str = ""  # calls this tool with what it was asked, in two pieces
    leak_mb: int = 0  # per request, and kept
    crash_after: int = 0  # pieces, then it is gone without a word
    hang_after: int = 0  # pieces, then nothing more
    exit: int = -1  # ends at once, with this code
    fail_every: int = 0  # every so many requests one fails
    dies_after_s: float = 0.0  # ends so long after its first request
    refuses: str = ""  # a file: answers that it failed, with this reason
    no_file: bool = False  # answers that it wrote a file, and wrote none
    # at the end
    free_hangs: bool = False

    def but(self, said: Mapping[str, str]) -> Misbehaviour:
        """With what is said changed; words nobody knows are ignored, as a model's options hold other things too."""
        known = {field.name: field.default for field in dataclasses.fields(self)}
        changed = {name: _read(text, known[name]) for name, text in said.items() if name in known}
        return dataclasses.replace(self, **changed)  # type: ignore[arg-type]

    def at_start(self) -> None:
        """Before the server exists."""
        if self.ignore_sigterm:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it stays pending for ever
        for number in range(self.start_lines):
            print(f"mock start line {number + 1}", file=sys.stderr, flush=True)
        if self.crash_at_start:
            sys.exit(self.crash_at_start)
        for number in range(self.grandchildren):
            last = number + 1 == self.grandchildren
            subprocess.Popen(["sleep", "3600"], start_new_session=last)
        while self.silent:
            time.sleep(3600)
        time.sleep(self.start_delay_s)

    def at_request(self, leaked: list[bytearray], number: int) -> None:
        """`number`: of the request, from 1."""
        if self.exit >= 0:
            os._exit(self.exit)
        if self.dies_after_s and number == 1:
            timer = threading.Timer(self.dies_after_s, os._exit, (1,))
            timer.daemon = True
            timer.start()
        if self.fail_every and number % self.fail_every == 0:
            raise RuntimeError(f"request {number} fails, as it was told to")
        if self.leak_mb:
            leaked.append(bytearray(os.urandom(1024)) * (1024 * self.leak_mb))


def from_environment(env: Mapping[str, str]) -> Misbehaviour:
    return Misbehaviour().but(
        {name.removeprefix("MOCK_").lower(): text for name, text in env.items() if name.startswith("MOCK_")}
    )


def from_prompt(text: str) -> tuple[dict[str, str], str]:
    """What the prompt asks for, and the rest of it."""
    return {name: value or "1" for name, value in _SAID.findall(text)}, _SAID.sub("", text)


def _read(text: str, default: object) -> object:
    match default:
        case bool():
            return text.lower() in ("1", "true", "yes", "on")
        case int():
            return int(text)
        case float():
            return float(text)
        case _:
            return text
