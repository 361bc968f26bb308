"""The parent of one backend process: `python -I -S shim.py FOLDER FD`. Standard library only, one file, one thread.

Backends outlive the worker, and some of them end when their parent changes, so their parent is this small process
instead. It reads `spec.json` in its folder, starts the command and stays: it writes the output to log files, keeps
`state.json` (the identity of shim and backend), answers on the unix socket `socket`, and writes `exit.json` when the
backend has ended. Each file appears by rename, whole or not at all. The shim holds a lock on the file `lock` for its
whole life: a process that gets the lock knows that the shim has ended. The shim closes the descriptor FD once the
socket answers. The worker knows the purpose of a process and decides about restarts.

On the socket every line is JSON. The shim sends its identity (`hello`), that the log has grown (`log`) and how the
backend ended (`exit`); end of file without `exit` means that the shim itself was killed. It obeys `stop` with
`grace_s`, and `kill`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # as `typing.TYPE_CHECKING`, without the memory of importing `typing`
if TYPE_CHECKING:
    from typing import Any

LOG_FOLDER = "log"
LONGEST_LINE = 16 * 1024
PIECE = 64 * 1024
KILL_AGAIN_S = 0.2
COMPANY_S = 10.0
GIVE_UP_S = 30.0  # a killed process can be stuck in a system call; it ends when the call returns

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
LINUX = sys.platform == "linux"


# -- identity of processes: the worker uses these too ------------------------------------------------------------------


def boot_id() -> str:
    """Changes when the machine starts: process ids of another boot identify no process."""
    if LINUX:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    with os.popen("sysctl -n kern.bootsessionuuid") as answer:
        return answer.read().strip()


def start_time(pid: int) -> str:
    """Identifies a process together with its id; empty where the process does not exist or is a zombie."""
    if not LINUX:
        with os.popen(f"ps -o lstart= -p {pid}") as answer:
            return answer.read().strip()
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in b"ZX" else fields[19].decode()


# -- files -----------------------------------------------------------------------------------------------------------


def write_whole(name: str, content: object) -> None:
    aside = f".{name}.new"
    with open(aside, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        json.dump(content, file)  # not synced: after a power cut the boot id differs, and the file is not used
    os.rename(aside, name)


def stamp() -> str:
    now = time.time_ns()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1_000_000_000)) + f".{now // 1000 % 1_000_000:06d}Z"


class Log:
    """Numbered files of `timestamp stream text` lines. When a file is full, the next begins and the oldest goes."""

    def __init__(self, limit: int, keep: int) -> None:
        self.limit, self.keep = limit, keep
        self.number, self.size, self.file = 0, 0, -1
        self.pending = {"stdout": b"", "stderr": b""}
        self.lost = 0
        os.makedirs(LOG_FOLDER, mode=0o700, exist_ok=True)
        self.turn()

    def turn(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        following = os.open(f"{LOG_FOLDER}/{self.number + 1:08d}", flags, 0o600)
        if self.file >= 0:
            os.close(self.file)
        self.file, self.size, self.number = following, 0, self.number + 1
        old = f"{LOG_FOLDER}/{self.number - self.keep:08d}"
        if os.path.exists(old):
            os.unlink(old)

    def take(self, stream: str, data: bytes) -> None:
        """Write output. A carriage return ends a line as well: progress bars write nothing else."""
        *lines, rest = (self.pending[stream] + data).replace(b"\r", b"\n").split(b"\n")
        while len(rest) > LONGEST_LINE:
            lines.append(rest[:LONGEST_LINE])
            rest = rest[LONGEST_LINE:]
        self.pending[stream] = rest
        self.write(stream, [line for line in lines if line])

    def finish(self) -> None:
        for stream, rest in self.pending.items():
            self.write(stream, [rest] if rest else [])
            self.pending[stream] = b""

    def say(self, text: str) -> None:
        self.write("stderr", [text.encode()])

    def write(self, stream: str, lines: list[bytes]) -> None:
        if not lines:
            return
        head = f"{stamp()} {stream} ".encode()
        pieces = [line[at : at + LONGEST_LINE] for line in lines for at in range(0, len(line), LONGEST_LINE)]
        batch: list[bytes] = []
        size = self.size
        for piece in pieces:
            batch.append(head + piece + b"\n")
            size += len(batch[-1])
            if size >= self.limit:
                self.put(batch, head)
                batch, size = [], self.size
        if batch:
            self.put(batch, head)

    def put(self, batch: list[bytes], head: bytes) -> None:
        try:
            if self.size >= self.limit:
                self.turn()
            if self.lost:
                batch = [head + b"(%d lines are missing here: the disk was full)\n" % self.lost, *batch]
            data = b"".join(batch)
            if os.write(self.file, data) < len(data):  # a torn line would be read as part of the next
                os.ftruncate(self.file, self.size)
                raise OSError("short write")
            self.size += len(data)
            self.lost = 0
        except OSError:  # a full disk must not stop a backend: it would block as soon as its pipe is full
            self.lost += len(batch)


# -- the backend -----------------------------------------------------------------------------------------------------


class Child:
    """The process and its children: a process group in the session of the shim, which reaps their orphans."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True) if LINUX else None
        if self.libc is not None:
            self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.status: int | None = None
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        fault_read, fault_write = os.pipe()
        shim = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.become(spec, shim, out_write, err_write)
            except BaseException as error:
                os.write(
                    fault_write, f"{spec['command'][0]}: {getattr(error, 'strerror', None) or error}".encode()[:4096]
                )
            os._exit(127)
        for descriptor in (out_write, err_write, fault_write):
            os.close(descriptor)
        self.started = start_time(self.pid)
        with open(fault_read, "rb") as fault:  # closed by the exec
            self.error = fault.read().decode(errors="replace")
        self.pipes = {out_read: "stdout", err_read: "stderr"}
        for descriptor in self.pipes:
            os.set_blocking(descriptor, False)

    def become(self, spec: dict[str, Any], shim: int, out: int, err: int) -> None:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, standard in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(descriptor, standard)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)  # ignored ones would survive the exec
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir(spec["directory"])
        if user := spec.get("user"):
            os.setgroups(user["groups"])
            os.setgid(user["gid"])
            os.setuid(user["uid"])
        if self.libc is not None:
            self.libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # last: a change of user takes it away
            if os.getppid() != shim:
                os._exit(1)
        os.execve(spec["command"][0], spec["command"], spec["env"])

    def signal(self, number: int) -> None:
        """Signal the whole group. Safe until `reap`: the zombie of the leader keeps its id from being reused."""
        try:
            os.killpg(self.pid, number)
            if number != signal.SIGKILL:
                os.killpg(self.pid, signal.SIGCONT)  # a stopped process would not receive it
        except (ProcessLookupError, PermissionError):
            pass

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for pid in self.others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ended(self) -> bool:
        if hasattr(os, "waitid"):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if self.status is None:  # macOS, before Python 3.13
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def others(self) -> list[int]:
        """Orphans of the backend that still run. Reaps those that have ended."""
        me = os.getpid()
        try:
            with open(f"/proc/{me}/task/{me}/children") as file:
                pids = [int(pid) for pid in file.read().split()]
        except OSError:
            return []
        running = []
        for pid in pids:
            if pid == self.pid:
                continue
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    running.append(pid)
            except ChildProcessError:
                pass
        return running

    def reap(self) -> tuple[int, int]:
        """Exit code and signal, one of them 0."""
        status = os.waitpid(self.pid, 0)[1] if self.status is None else self.status
        return (0, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), 0)


# -- connections of workers --------------------------------------------------------------------------------------------


class Listener:
    """One connected worker. Usually there is one, and two while a worker hands over to the next."""

    def __init__(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        self.sock = sock
        self.inbox = b""
        self.outbox = b""
        sock.setblocking(False)
        self.tell("hello", hello)

    def tell(self, word: str, content: object) -> None:
        self.outbox += json.dumps({word: content}).encode() + b"\n"
        self.flush()

    def ring(self) -> None:
        """Report that the log has grown: once, until the message was sent."""
        if not self.outbox:
            self.tell("log", True)

    def flush(self) -> None:
        try:
            while self.outbox:
                self.outbox = self.outbox[self.sock.send(self.outbox) :]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox = b""

    def orders(self) -> list[Any]:
        """The orders that the worker sent; raises EOFError when the connection is closed."""
        try:
            data = self.sock.recv(PIECE)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Shim:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.server = socket.socket(socket.AF_UNIX)
        if os.path.lexists("socket"):
            os.unlink("socket")
        self.server.bind("socket")
        os.chmod("socket", 0o600)
        self.server.listen(8)
        self.server.setblocking(False)
        self.poll = select.poll()
        self.listeners: dict[int, Listener] = {}
        self.deadline = 0.0  # when the rest is killed; 0: no stop was ordered
        self.stop_requested = False
        self.signalled: set[int] = set()
        self.met = False  # no worker has connected yet
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.woken = woken
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.log = Log(spec["log_bytes"], spec["log_files"])
        self.child = Child(spec)
        self.me = {
            "process_id": spec["process_id"],
            "boot_id": boot_id(),
            "pid": self.child.pid,
            "start": self.child.started,
            "shim_pid": os.getpid(),
            "shim_start": start_time(os.getpid()),
        }

    def run(self, ready: int) -> None:
        write_whole("state.json", self.me)
        os.close(ready)
        if self.child.error:
            self.log.say(self.child.error)
        for descriptor in (self.server.fileno(), self.woken, *self.child.pipes):
            self.poll.register(descriptor, select.POLLIN)
        while not self.over():
            self.turn()
        self.drain()
        code, number = self.child.reap()
        how = {"code": code, "signal": number, "asked": self.stop_requested, "error": self.child.error, "at": stamp()}
        write_whole("exit.json", {**self.me, **how})
        self.wait_for_company()
        for listener in self.listeners.values():
            listener.sock.settimeout(1.0)
            listener.tell("exit", how)
        if os.path.lexists("socket"):
            os.unlink("socket")

    def turn(self) -> None:
        left_s = self.deadline - time.monotonic()
        wait_s = None if not self.deadline else left_s if left_s > 0 else KILL_AGAIN_S
        has_output = False
        for descriptor, event in self.poll.poll(None if wait_s is None else wait_s * 1000 + 1):
            if descriptor in self.child.pipes:
                has_output |= self.read_output(descriptor)
            elif descriptor == self.server.fileno():
                self.welcome()
            elif descriptor == self.woken:
                self.read_signals()
            elif descriptor in self.listeners:
                self.serve(descriptor, event)
        if has_output:
            for listener in self.listeners.values():
                listener.ring()
        for descriptor, listener in self.listeners.items():
            self.poll.modify(descriptor, select.POLLIN | (select.POLLOUT if listener.outbox else 0))

    def over(self) -> bool:
        """Whether the backend and all its children have ended. Kills those whose grace period is over."""
        now = time.monotonic()
        ended = self.child.ended()
        if ended and not self.deadline:
            self.deadline = now  # it ended by itself: its children are of no use
        if self.deadline and now >= self.deadline:
            self.child.kill()
            ended = self.child.ended()
        left = self.child.others()
        if ended and now < self.deadline:  # processes that left the group did not get the signal yet
            for pid in set(left) - self.signalled:
                self.signalled.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
        return ended and (not left or now > self.deadline + GIVE_UP_S)

    def read_output(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, PIECE)
        except BlockingIOError:
            return False
        if not data:
            self.poll.unregister(descriptor)
            os.close(descriptor)
            del self.child.pipes[descriptor]
            return False
        self.log.take(self.child.pipes[descriptor], data)
        return True

    def drain(self) -> None:
        for descriptor in list(self.child.pipes):
            while descriptor in self.child.pipes and self.read_output(descriptor):
                pass
        self.log.finish()

    def wait_for_company(self) -> None:
        """A backend may end before the worker that started it has connected: wait, so that the worker gets the exit."""
        waiting = select.poll()
        waiting.register(self.server.fileno(), select.POLLIN)
        while waiting.poll(0 if self.met else COMPANY_S * 1000):
            self.welcome()

    def welcome(self) -> None:
        self.met = True
        try:
            sock, _ = self.server.accept()
        except OSError:
            return
        self.listeners[sock.fileno()] = Listener(sock, self.me)
        self.poll.register(sock.fileno(), select.POLLIN)

    def serve(self, descriptor: int, event: int) -> None:
        listener = self.listeners[descriptor]
        if event & select.POLLOUT:
            listener.flush()
        if not event & ~select.POLLOUT:
            return
        try:
            for order in listener.orders():
                self.obey(order)
        except (EOFError, ValueError, TypeError, AttributeError):  # closed, or not our protocol
            self.poll.unregister(descriptor)
            del self.listeners[descriptor]
            listener.sock.close()

    def obey(self, order: dict[str, Any]) -> None:
        if "stop" in order:
            self.stop(float(order["stop"]))
        elif "kill" in order:
            self.stop(0.0)

    def read_signals(self) -> None:
        for number in os.read(self.woken, 512):
            if number in (signal.SIGTERM, signal.SIGINT):
                self.stop(float(self.spec["grace_s"]))

    def stop(self, grace_s: float) -> None:
        """Of several stops the earliest deadline counts."""
        self.stop_requested = True
        until = time.monotonic() + grace_s
        self.deadline = min(self.deadline, until) if self.deadline else until
        if grace_s > 0:
            self.child.signal(signal.SIGTERM)


def main() -> None:
    ready = int(sys.argv[2])
    os.set_inheritable(ready, False)  # the backend would keep it open
    os.chdir(sys.argv[1])  # the socket's path stays short, however long the folder's is
    if os.getsid(0) != os.getpid():
        os.setsid()
    lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if os.path.exists("exit.json"):
        return  # the worker gave this process up before it began
    with open("spec.json") as file:
        spec = json.load(file)
    Shim(spec["run"]).run(ready)


if __name__ == "__main__":
    main()
