"""How the probe looks at the machine: files below one root, commands on PATH with a time limit, and a notice board.

A test hands in another root and another environment; nothing else in this package opens a file of the system or starts
a process. A thing that is not there is None, never an exception.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corral.kit.log import get_log
from corral.kit.subprocesses import capture_blocking

log = get_log(__name__)

_ARCHES = {"x86_64": "amd64", "x64": "amd64", "aarch64": "arm64", "armv8l": "arm64", "i686": "386", "i386": "386"}


class Notices:
    """Says each thing once: a probe runs every few seconds, and odd hardware stays odd."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def tell(self, source: str, problem: str, *, detail: str = "", ordinary: bool = False) -> None:
        """`ordinary`: most machines are like this (no NVIDIA library, say), so only debugging wants to know.
        What changes from call to call belongs in `detail`."""
        if (source, problem) in self._reported:
            return
        self._reported.add((source, problem))
        if ordinary:
            log.debug("hardware source absent", source=source, why=problem, detail=detail)
        else:
            log.warning("hardware source does not answer, left out", source=source, why=problem, detail=detail)


@dataclass(frozen=True)
class Host:
    env: Mapping[str, str]
    root: Path = Path("/")
    system: str = field(default_factory=platform.system)
    machine: str = field(default_factory=platform.machine)
    command_timeout_s: float = 10.0
    notices: Notices = field(default_factory=Notices)

    @property
    def os(self) -> str:
        """`linux`, `darwin`: the words of image indexes."""
        return self.system.lower()

    @property
    def arch(self) -> str:
        """`amd64`, `arm64`: the words of image indexes."""
        machine = self.machine.lower()
        return _ARCHES.get(machine, machine)

    def text(self, path: Path | str) -> str | None:
        """A small file below the root, stripped. Device-tree files end in NUL."""
        try:
            return (self.root / path).read_bytes().decode(errors="replace").strip("\0 \t\r\n")
        except (OSError, ValueError):
            return None

    def number(self, path: Path | str, base: int = 10) -> int | None:
        try:
            return int(self.text(path) or "", base)
        except ValueError:
            return None

    def listing(self, folder: Path | str, pattern: str) -> list[Path]:
        """Entries that match, in name order; empty where there is no such folder."""
        try:
            return sorted((self.root / folder).glob(pattern))
        except OSError:
            return []

    def which(self, command: str) -> str | None:
        return shutil.which(command, path=self.env.get("PATH", ""))

    def run(self, command: str, *arguments: str) -> str | None:
        """What the command printed; None if it is not there, fails, or takes too long."""
        program = self.which(command)
        if program is None:
            return None
        try:
            return self._output_of([program, *arguments])
        except subprocess.TimeoutExpired:
            self.notices.tell(command, f"no answer within {self.command_timeout_s:g} s")
        except OSError as error:
            self.notices.tell(command, str(error.strerror or error))
        return None

    def _output_of(self, argv: Sequence[str]) -> str | None:
        # Only what a tool needs to find itself and its libraries: this process holds secrets.
        env = {name: self.env[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in self.env}
        ran = capture_blocking(argv, env={**env, "LC_ALL": "C"}, timeout_s=self.command_timeout_s)
        if ran.status != 0:
            self.notices.tell(Path(argv[0]).name, f"ended with status {ran.status}")
            return None
        return ran.stdout
