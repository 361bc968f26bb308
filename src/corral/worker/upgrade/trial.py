"""Replaces the running worker by another version, watches it, and returns to the old version when the new one does not
take over or is not ready in time: `python -m corral.worker.upgrade.trial`, a process of its own that outlives both.

Taking over is an ordinary reload (docs/adr/0008): a reload starts the version that `current` names. The outcome is in
upgrade.json of the data folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec
import psutil

from corral.kit.errors import Denied, NotFound
from corral.kit.files import write_atomically
from corral.worker.agent.join.identity import holder_of
from corral.worker.reload import keeper
from corral.worker.upgrade import readiness
from corral.worker.upgrade.versions import Versions

FILE = "upgrade.json"
TAKE_OVER_S = 60.0
READY_S = 60.0
_POLL_S = 0.1
_MODULE = "corral.cli.main"
_KEEPER = "/corral/worker/reload/keeper.py"
_RESTART_S = 10.0  # a service manager restarts a worker within this time


class TrialState(StrEnum):
    BUILDING = "building"  # the first two and `rejected` only for an order of the controller
    CHECKING = "checking"
    REJECTED = "rejected"  # it was not tried, and nothing has changed
    STARTING = "starting"  # the new version has not taken over yet
    WATCHING = "watching"  # it has, and is not ready yet
    DONE = "done"
    RETURNED = "returned"  # the old version serves again
    FAILED = "failed"  # neither is ready


class Trial(msgspec.Struct, frozen=True):
    old: str  # folders of versions
    new: str
    state: TrialState
    reason: str = ""
    order: str = ""  # of the controller; empty: a person runs the command
    is_final: bool = False  # another attempt with this version would fail the same way

    @property
    def has_ended(self) -> bool:
        return self.state in (TrialState.DONE, TrialState.RETURNED, TrialState.FAILED, TrialState.REJECTED)


def read_trial(data: Path) -> Trial | None:
    try:
        return msgspec.json.decode((data / FILE).read_bytes(), type=Trial)
    except (OSError, msgspec.DecodeError):
        return None


def write_trial(data: Path, trial: Trial) -> None:
    write_atomically(data / FILE, msgspec.json.encode(trial))


class Attempt:
    """One trial. `old` and `new` are folders of versions."""

    def __init__(
        self, data: Path, old: Path, new: Path, *, take_over_s: float, ready_s: float, order: str = ""
    ) -> None:
        self._data = data
        self._order = order
        self._old = old
        self._new = new
        self._versions = Versions(new.parent.parent)
        self._take_over_s = take_over_s
        self._ready_s = ready_s
        before = holder_of(data)
        if before is None:
            raise NotFound(f"no worker runs in {data}")
        self._before = before
        self._anchor = find_anchor(before)
        process = psutil.Process(before)
        self._words, self._env = arguments_of(process.cmdline()), process.environ()  # to start it again

    def run(self) -> Trial:
        self._versions.make_current(self._new)
        self._write(TrialState.STARTING)
        self._signal_anchor()
        if not self._wait(self._has_taken_over, self._take_over_s, give_up=self._has_died()):
            return self._return(f"the new version did not take over within {self._take_over_s:g} s, or ended")
        self._write(TrialState.WATCHING)
        if not self._wait(lambda: self._is_ready(self._new), self._ready_s, give_up=self._has_died()):
            return self._return(f"the new version was not ready within {self._ready_s:g} s, or ended")
        return self._write(TrialState.DONE)

    def _return(self, reason: str) -> Trial:
        """The old version serves on, or is started again and adopts the backends."""
        self._versions.make_current(self._old)
        if holder_of(self._data) != self._before:
            self._signal_anchor()  # first, or a keeper without workers would end
        self._kill_new()
        if not self._wait(lambda: self._runs_from(self._old), _RESTART_S):
            self._start_old()
        is_back = self._wait(lambda: self._is_ready(self._old), self._ready_s)
        return self._write(TrialState.RETURNED if is_back else TrialState.FAILED, reason)

    def _signal_anchor(self) -> None:
        try:
            os.kill(self._anchor, signal.SIGUSR2)
        except ProcessLookupError:
            pass  # it has ended: the worker is started again below
        except PermissionError:
            raise Denied(f"the worker (pid {self._before}) belongs to another user") from None

    def _has_taken_over(self) -> bool:
        return self._runs_from(self._new)

    def _runs_from(self, folder: Path) -> bool:
        holder = holder_of(self._data)
        return holder is not None and is_program_of(holder, folder)

    def _is_ready(self, folder: Path) -> bool:
        ready, holder = readiness.read(self._data), holder_of(self._data)
        return ready is not None and ready.pid == holder and Path(ready.program) == folder.resolve()

    def _has_died(self) -> Callable[[], bool]:
        """Whether the new version was seen, and is gone."""
        seen = False

        def has_died() -> bool:
            nonlocal seen
            running = bool(self._new_processes())
            seen = seen or running
            return seen and not running

        return has_died

    def _new_processes(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self._anchor).children()
        if (holder := holder_of(self._data)) is not None:
            with contextlib.suppress(psutil.Error):
                found.append(psutil.Process(holder))
        return [each for each in found if is_program_of(each.pid, self._new) and is_worker(each)]

    def _kill_new(self) -> None:
        for each in self._new_processes():
            with contextlib.suppress(psutil.Error):
                each.kill()

    def _start_old(self) -> None:
        """Nobody restarts the worker: it was started by hand, and its keeper has ended."""
        if holder_of(self._data) is None:
            env = {key: value for key, value in self._env.items() if key != keeper.SUCCEED}
            subprocess.Popen([self._versions.command, *self._words], env=env, start_new_session=True)

    def _wait(self, is_true: Callable[[], bool], timeout_s: float, give_up: Callable[[], bool] | None = None) -> bool:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if is_true():
                return True
            if give_up is not None and give_up():
                return is_true()
            time.sleep(_POLL_S)
        return False

    def _write(self, state: TrialState, reason: str = "") -> Trial:
        trial = Trial(str(self._old), str(self._new), state, reason, self._order)
        write_trial(self._data, trial)
        return trial


def find_anchor(worker: int) -> int:
    """The process that starts successors of a worker: its keeper, or the worker itself."""
    try:
        parent = psutil.Process(worker).parent()
        words = parent.cmdline() if parent is not None else []
    except psutil.Error:
        return worker
    # The keeper may be of any version that ran here before. A worker that has handed over becomes the keeper under its
    # process id, but only when its last stream has ended.
    is_corral = _MODULE in words[:5] or (len(words) > 1 and Path(words[1]).name == "corral")
    is_old_worker = is_corral and arguments_of(words)[:1] in (["worker"], ["join"])
    is_keeper = is_old_worker or any(word.endswith(_KEEPER) for word in words[:5])
    return parent.pid if parent is not None and is_keeper else worker


def is_program_of(pid: int, folder: Path) -> bool:
    """Whether the process runs from this environment: its interpreter is the one of the environment, by name."""
    program = program_of(pid)
    return program is not None and program == folder.resolve()


def program_of(pid: int) -> Path | None:
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return None
    return Path(words[0]).parent.parent.resolve() if words and "/" in words[0] else None


def arguments_of(words: list[str]) -> list[str]:
    """Of a command line: `python …/bin/corral worker …` or `python -m corral.cli.main worker …`."""
    return words[words.index(_MODULE) + 1 :] if _MODULE in words[:5] else words[2:]


def is_worker(process: psutil.Process) -> bool:
    """Not a shim of a backend, which must live on."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return len(words) > 1 and Path(words[1]).name == "corral"


def main(data: str, old: str, new: str, take_over_s: str, ready_s: str, order: str = "") -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    attempt = Attempt(
        Path(data), Path(old), Path(new), take_over_s=float(take_over_s), ready_s=float(ready_s), order=order
    )
    return 0 if attempt.run().state is TrialState.DONE else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
