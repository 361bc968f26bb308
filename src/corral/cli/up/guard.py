"""Runs in a child before it becomes what it is: dies with its parent, then turns into the command it was given.

`python -I -S guard.py PARENT_PID COMMAND…`, standard library only. A wrapper rather than code between fork and exec in
the parent: the parent has threads, and Python must not run in a forked child that had them. The death signal survives
the exec. SIGKILL, because the parent's sudden end is a crash: nothing shall tidy up (a worker would stop its backends,
which are meant to outlive it), and nothing shall linger.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"cannot bind this process to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it went before we asked to be told: nobody would tell us any more
        sys.exit(1)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        # Ignored signals survive an exec, and Python ignores SIGPIPE: the command shall start as any other does.
        signal.signal(each, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
