"""The process that remains of a worker that has handed over: `python -I -S keeper.py PID… -- COMMAND`. Standard library
only.

systemd, `corral up` or a shell know the worker by its process id, so this id must exist while successors do the work.
The old worker becomes this small program when its last stream has ended. The keeper passes signals on to the workers,
starts another successor on SIGUSR2, and exits with the code of the last worker.
"""

from __future__ import annotations

import os
import signal
import sys

SUCCEED = "CORRAL_INTERNAL_SUCCEED"  # in the environment of a successor: the process id of its keeper
PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
HANDLED = PASSED_ON | {signal.SIGUSR2, signal.SIGCHLD}


def start_successor(command: list[str], keeper: int) -> int:
    """Start a worker as a child of the caller; when it is ready, it asks the running worker to hand over. It has a
    process group of its own: Ctrl-C in a terminal is for the keeper, which passes it on; two signals would mean
    hurry."""
    environ = {**os.environ, SUCCEED: str(keeper)}
    return os.posix_spawn(command[0], command, environ, setpgroup=0, setsigmask=[], setsigdef=HANDLED)


def reap(workers: list[int], code: int) -> int:
    """Reap all children that have ended, shims of backends too. Returns the exit code of the last worker among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid in workers:
            workers.remove(pid)
            code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def main() -> int:
    cut = sys.argv.index("--")
    workers, command = [int(pid) for pid in sys.argv[1:cut]], sys.argv[cut + 1 :]
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    code = reap(workers, 0)  # children that have ended already
    while workers:
        number = signal.sigwait(HANDLED)
        if number == signal.SIGCHLD:
            code = reap(workers, code)
        elif number == signal.SIGUSR2:
            workers.append(start_successor(command, os.getpid()))
        else:
            for pid in workers:  # only this process reaps them, so no other process has their ids
                os.kill(pid, number)
    return code


if __name__ == "__main__":
    sys.exit(main())
