"""An upgrade that the controller has ordered, as a process of its own that outlives the worker:
`python -m corral.worker.upgrade.detached DATA WHEEL PACKAGES ORDER SECONDS`. How it stands is in upgrade.json, also
when nothing was tried.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

from corral.kit.errors import Conflict, CorralError
from corral.worker.upgrade.build import UnusableVersion
from corral.worker.upgrade.trial import Trial, TrialState, read_trial, write_trial
from corral.worker.upgrade.upgrade import upgrade


def main(data: str, wheel: str, packages: str, order: str, timeout_s: str) -> int:
    """`packages`: the folder with the wheels of the dependencies; empty: the package index has them."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _on_cancel)  # the build removes what it has written
    try:
        ended = upgrade(
            Path(data),
            Path(wheel),
            _say,
            packages=Path(packages) if packages else None,
            order=order,
            take_over_s=float(timeout_s),
            ready_s=float(timeout_s),
        )
    except (CorralError, OSError) as error:
        reason = error.message if isinstance(error, CorralError) else str(error)
        _say(reason)
        if isinstance(error, Conflict):  # the file is that of another upgrade
            return 1
        _reject(Path(data), order, reason, is_final=isinstance(error, UnusableVersion))
        return 1
    except SystemExit:
        _reject(Path(data), order, "cancelled", is_final=False)
        raise
    finally:
        shutil.rmtree(Path(wheel).parent, ignore_errors=True)  # the wheels: they are installed, or fetched again
    return 0 if ended.state is TrialState.DONE else 1


def _reject(data: Path, order: str, reason: str, *, is_final: bool) -> None:
    """Unless the trial has begun: then its own process writes how it ends."""
    found = read_trial(data)
    if found is not None and found.order == order and found.state not in (TrialState.BUILDING, TrialState.CHECKING):
        return
    old, new = (found.old, found.new) if found is not None and found.order == order else ("", "")
    write_trial(data, Trial(old, new, TrialState.REJECTED, reason, order, is_final))


def _on_cancel(_number: int, _frame: object) -> NoReturn:
    sys.exit(1)


def _say(text: str) -> None:
    print(f"corral upgrade: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
