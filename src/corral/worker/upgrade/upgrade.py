"""`corral worker upgrade --wheel FILE`: builds the version beside the running one, checks it against the data folder,
and starts its trial. Blocking.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from corral.kit.errors import Conflict, Failed, Invalid, NotFound
from corral.kit.subprocesses import capture_blocking
from corral.worker.agent.join.identity import holder_of
from corral.worker.upgrade import trial
from corral.worker.upgrade.build import UnusableVersion, build, read_wheel
from corral.worker.upgrade.prune import prune
from corral.worker.upgrade.trial import Trial, TrialState, program_of, read_trial, write_trial
from corral.worker.upgrade.versions import Versions, find_versions, why_not

LOCK = "upgrade.lock"
_CHECK_S = 60.0
_POLL_S = 0.1
_LOOKING_S = 1.0  # `is_upgrading` holds the lock for much less
_MORE_S = 60.0  # the trial ends itself; this is for one that was killed

Say = Callable[[str], None]


def upgrade(
    data: Path,
    wheel_path: Path,
    say: Say,
    *,
    packages: Path | None = None,
    env: Mapping[str, str] = os.environ,
    order: str = "",
    take_over_s: float = trial.TAKE_OVER_S,
    ready_s: float = trial.READY_S,
) -> Trial:
    """How the trial ended. With `order` the steps before it are in its file too. Raises Invalid, NotFound, Conflict,
    Denied and Failed: then nothing has changed."""
    holder = holder_of(data)
    if holder is None:
        raise NotFound(f"no worker runs in {data}; name its folder with --data")
    old = program_of(holder)
    if old is None:
        raise Failed(f"it cannot be seen which program the worker (pid {holder}) runs: try as its user, or as root")
    if reason := why_not(old):
        raise Invalid(f"this worker cannot be upgraded by itself: {reason}")
    versions = find_versions(old)
    assert versions is not None  # otherwise there is a reason
    wheel = read_wheel(wheel_path)
    with _alone(versions) as lock:
        new = versions.folder(wheel.sha256)
        if new.resolve() == old:
            raise Conflict(f"the worker runs this version already ({wheel.version}, {new.name})")
        say(f"building Corral {wheel.version} in {new}")
        if order:
            write_trial(data, Trial(str(old), str(new), TrialState.BUILDING, order=order))
        build(versions, wheel, packages=packages, env=env)
        if order:
            write_trial(data, Trial(str(old), str(new), TrialState.CHECKING, order=order))
        check_version(new, data, env)
        say("the new version takes over")
        ended = run_trial(data, old, new, lock, take_over_s=take_over_s, ready_s=ready_s, order=order)
        if ended.state is TrialState.DONE and (removed := prune(versions, (old, new))):
            say(f"removed versions that nothing uses any more: {', '.join(removed)}")
        return ended


def check_version(new: Path, data: Path, env: Mapping[str, str]) -> None:
    """Let the new version check itself against the data folder. Raises UnusableVersion."""
    command = [str(new / "bin" / "python"), "-I", "-m", "corral.worker.upgrade.check", str(data)]
    try:
        ran = capture_blocking(command, env=env, timeout_s=_CHECK_S)
    except subprocess.TimeoutExpired:
        raise UnusableVersion(
            f"the new version did not check itself within {_CHECK_S:g} s: nothing was changed"
        ) from None
    if ran.status != 0:
        lines = ran.stderr.strip().splitlines() or [f"exit status {ran.status}"]
        raise UnusableVersion(f"the new version does not work here: {lines[-1][:300]}; nothing was changed")


def run_trial(
    data: Path, old: Path, new: Path, lock: int, *, take_over_s: float, ready_s: float, order: str = ""
) -> Trial:
    """Start the trial as a process of the old version, and wait for its end. It holds the lock until then."""
    write_trial(data, Trial(str(old), str(new), TrialState.STARTING, order=order))
    words = [str(data), str(old), str(new), str(take_over_s), str(ready_s), *([order] if order else [])]
    process = subprocess.Popen(
        [str(old / "bin" / "python"), "-I", "-m", "corral.worker.upgrade.trial", *words],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(lock,),
    )
    until = time.monotonic() + take_over_s + 2 * ready_s + _MORE_S
    while time.monotonic() < until:
        status = process.poll()
        found = read_trial(data)
        if status is not None and found is not None:
            if found.has_ended:
                return found
            raise Failed(f"the trial of the new version ended with status {status}: see the lines above")
        time.sleep(_POLL_S)
    raise Failed("the trial of the new version does not end: see upgrade.json in the data folder")


@contextlib.contextmanager
def _alone(versions: Versions) -> Iterator[int]:
    """One upgrade at a time, until its trial has ended too."""
    descriptor = os.open(versions.root / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until = time.monotonic() + _LOOKING_S
        while not _try_lock(descriptor):
            if time.monotonic() > until:
                raise Conflict("another upgrade of this machine is in progress: wait for its end")
            time.sleep(_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def is_upgrading(versions: Versions) -> bool:
    """Whether an upgrade of this machine, or its trial, is in progress. It holds the lock for a moment."""
    try:
        descriptor = os.open(versions.root / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
