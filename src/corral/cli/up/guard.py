"""Runs in a child process before its command: binds the process to the life of its parent, then executes the command.

`python -I -S guard.py PARENT_PID COMMAND…`, standard library only. A wrapper and not code between fork and exec in the
parent: the parent has threads, and Python code must not run in a fork of a process with threads. The death signal
survives the exec. It is SIGKILL, because the sudden end of the parent is a crash: a worker that got SIGTERM would stop
its backends, which are meant to outlive it.

The guard also moves listening sockets to the descriptors that socket activation prescribes, 3 and up, and sets the
process id of the command, which is known only here.
"""

import ctypes
import fcntl
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
FIRST_FD = 3
LISTENERS = "CORRAL_INTERNAL_LISTENERS"  # from the supervisor: descriptors of listening sockets, "7,8"
LISTENER_NAME = "CORRAL_INTERNAL_LISTENER_NAME"
READY_FD = "CORRAL_INTERNAL_READY_FD"


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"cannot bind this process to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # the parent ended before prctl took effect: no signal would come
        sys.exit(1)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        # Ignored signals survive an exec, and Python ignores SIGPIPE: restore the defaults for the command.
        signal.signal(each, signal.SIG_DFL)
    pass_listeners()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


def pass_listeners() -> None:
    listeners = [int(number) for number in os.environ.pop(LISTENERS, "").split(",") if number]
    name = os.environ.pop(LISTENER_NAME, "")
    if not listeners:
        return
    free = FIRST_FD + len(listeners)  # first move every descriptor that occupies the target range
    copies = [move_beyond(each, free) for each in listeners]
    if READY_FD in os.environ:
        os.environ[READY_FD] = str(move_beyond(int(os.environ[READY_FD]), free))
    for place, copy in enumerate(copies, FIRST_FD):
        os.dup2(copy, place)
        os.close(copy)
    os.environ["LISTEN_PID"] = str(os.getpid())
    os.environ["LISTEN_FDS"] = str(len(listeners))
    os.environ["LISTEN_FDNAMES"] = ":".join([name] * len(listeners))


def move_beyond(descriptor: int, first: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, first)
    os.close(descriptor)
    return moved


if __name__ == "__main__":
    main()
