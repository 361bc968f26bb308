"""The entry point. Answers `corral --help` and `corral --version` from data, and prints lists (`lists.py`); everything
else runs in `run.py`.

Imports nothing that these two do not need: importing the parser alone takes longer than starting the interpreter.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

_HAVE_LISTS = ("nodes", "models", "ops", "ps", "requests")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):  # `corral nodes list >&-`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if words in (["--help"], ["-h"]):
        from corral.cli.commands import help_text

        return _print(help_text())
    if words == ["--version"]:
        from corral import __version__

        return _print(f"corral {__version__}")
    if (code := _print_list(words)) is not None:
        if arguments is None:
            os._exit(code)  # everything is printed; taking the interpreter apart takes a tenth of the command
        return code
    from corral.cli.run import run

    return run(words)


def _print_list(words: list[str]) -> int | None:
    if (words and words[0] not in _HAVE_LISTS) or "_CORRAL_COMPLETE" in os.environ:
        return None
    gc.disable()  # what is imported stays
    try:
        from corral.cli.lists import print_list

        return print_list(words)
    finally:
        gc.enable()


def _print(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `corral --help | head` closed the pipe
        sys.stdout = None  # the interpreter would report the same error at exit
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
