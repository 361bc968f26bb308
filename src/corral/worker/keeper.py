"""What is left of a worker that has handed over: `python -I -S keeper.py PID… -- COMMAND`. Standard library only.

Whoever started the worker (systemd, `corral up`, a shell) knows it by its process id, so that id must live on while
successors do the work. The old worker becomes this small program when its last stream has ended. It passes signals on
to the workers, starts a successor when asked for one more (SIGUSR2), and ends as the last worker ends.
"""

from __future__ import annotations

import os
import signal
import sys

SUCCEED = "CORRAL_INTERNAL_SUCCEED"  # in the environment of a successor: the process id of its keeper
PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
HEARD = PASSED_ON | {signal.SIGUSR2, signal.SIGCHLD}


def start_successor(command: list[str], keeper: int) -> int:
    """A child of the caller's. It asks the worker at work to hand over, once it is ready to take over.
    In a group of its own: Ctrl-C in a terminal is for the keeper, which passes it on; twice would mean hurry."""
    environ = {**os.environ, SUCCEED: str(keeper)}
    return os.posix_spawn(command[0], command, environ, setpgroup=0, setsigmask=[], setsigdef=HEARD)


def bury(workers: list[int], code: int) -> int:
    """Take the remains of whoever has ended, backends' shims too. The exit code of the last worker among them."""
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
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    code = bury(workers, 0)  # who ended before anybody waited
    while workers:
        number = signal.sigwait(HEARD)
        if number == signal.SIGCHLD:
            code = bury(workers, code)
        elif number == signal.SIGUSR2:
            workers.append(start_successor(command, os.getpid()))
        else:
            for pid in workers:  # children that nobody but we bury: their numbers are theirs
                os.kill(pid, number)
    return code


if __name__ == "__main__":
    sys.exit(main())
