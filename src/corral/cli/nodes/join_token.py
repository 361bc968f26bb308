"""Removes join tokens from the command line, because every user of a machine can read the arguments of its processes.

`hide_token` moves a token given as `--token cj_…` into the environment, which only the same user can read, by executing
the same program again in the same process. `--token -` reads the token from standard input.
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Sequence
from typing import Any

from corral.cli.common import declare

FROM_STDIN = "-"
_FLAG = "--token"
_VARIABLE = "CORRAL_TOKEN"


def hide_token(given: dict[str, Any]) -> dict[str, Any]:
    """The flags with the token read. Does not return if the token was an argument of this process: it executes the
    program again."""
    token = given.get("token")
    if not token:
        return given
    if token == FROM_STDIN:
        token = _read_token()
    before = sys.orig_argv[1:]
    words = without_token(before)
    if words != before:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *words], {**os.environ, _VARIABLE: token})
    return given | {"token": token}


def without_token(words: Sequence[str]) -> list[str]:
    """The arguments less every `--token X` and `--token=X`. Pure."""
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == _FLAG:
            next(rest, None)
        elif not word.startswith(f"{_FLAG}="):
            left.append(word)
    return left


def _read_token() -> str:
    line = getpass.getpass("join token: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not line.strip():
        raise declare.BadParameter("--token - reads the token from standard input, but standard input is empty")
    return line.strip()
