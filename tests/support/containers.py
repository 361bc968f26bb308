"""Containers without a container engine: a root of their own over an image's, namespaces, users and capabilities, on a
network of their own. Needs root.

Emulated: entry point, command, environment, user, volumes, tmpfs, read-only roots, dropped capabilities,
no-new-privileges, names of other containers, health checks. Not emulated: cgroups, seccomp, AppArmor, published ports,
GPUs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.dockerfile import Healthcheck
from tests.support.network import ip
from tests.support.processes import Process

# What Docker leaves a container that asks for nothing.
DEFAULT_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
)

_START = """
set -e
mount -t overlay overlay -o "lowerdir=$IMAGE,upperdir=$UPPER,workdir=$WORK" "$MERGED"
mount -t proc proc "$MERGED/proc"
mount -t sysfs -o ro sysfs "$MERGED/sys"
mount -t tmpfs -o mode=755 tmpfs "$MERGED/dev"
for node in null zero full random urandom tty; do
  touch "$MERGED/dev/$node"
  mount --bind "/dev/$node" "$MERGED/dev/$node"
done
ln -s /proc/self/fd "$MERGED/dev/fd"
mkdir "$MERGED/dev/shm"; mount -t tmpfs -o mode=1777 tmpfs "$MERGED/dev/shm"
while [ "$1" != -- ]; do
  case "$1" in
    tmpfs) mkdir -p "$MERGED$2"; mount -t tmpfs -o mode=1777 tmpfs "$MERGED$2"; shift 2 ;;
    bind) mkdir -p "$MERGED$3"; mount --bind "$2" "$MERGED$3"; mount -o "remount,bind,$4" "$MERGED$3"; shift 4 ;;
    readonly) mount -o remount,ro "$MERGED"; shift ;;
  esac
done
shift
exec chroot "$MERGED" "$@"
"""


@dataclass(frozen=True)
class Mount:
    target: str
    source: Path
    read_only: bool = False


@dataclass(frozen=True)
class ContainerSpec:
    image: Path
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = "root"
    mounts: Sequence[Mount] = ()
    tmpfs: Sequence[str] = ()
    read_only: bool = False
    capabilities: Sequence[str] = DEFAULT_CAPABILITIES
    no_new_privileges: bool = False


class Network:
    """A bridge in a namespace of its own; each container is another namespace with one address on it."""

    def __init__(self, name: str, *, with_host: bool = False) -> None:
        """`with_host`: this machine is on it too, so containers reach it, and nothing beyond it."""
        self.name = name
        self.hosts: dict[str, str] = {}
        self._namespaces: list[str] = []
        self._with_host = with_host
        # Of its own, since this machine has a route to it.
        self._subnet = f"10.{160 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        self._add(name)
        ip("-n", name, "link", "add", "bridge", "type", "bridge")
        ip("-n", name, "link", "set", "bridge", "up")
        if with_host:
            end = f"corral-{os.getpid()}"[:15]
            ip("link", "add", end, "type", "veth", "peer", "name", "host", "netns", name)
            ip("-n", name, "link", "set", "host", "master", "bridge", "up")
            ip("address", "add", f"{self._subnet}.254/24", "dev", end)
            ip("link", "set", end, "up")

    def attach(self, host: str) -> str:
        """The namespace of a new container with this name."""
        number = len(self._namespaces) + 1
        namespace, end, address = f"{self.name}-{number}", f"c{number}", f"{self._subnet}.{number}"
        self._add(namespace)
        ip("link", "add", end, "netns", self.name, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("-n", self.name, "link", "set", end, "master", "bridge", "up")
        ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "eth0", "up")
        if self._with_host:
            ip("-n", namespace, "route", "add", "default", "via", f"{self._subnet}.254")
        self.hosts[host] = address
        return namespace

    def close(self) -> None:
        for namespace in reversed(self._namespaces):
            ip("netns", "delete", namespace)

    def _add(self, namespace: str) -> None:
        ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        ip("-n", namespace, "link", "set", "lo", "up")


class Container:
    """Keeps what it wrote over restarts, like one that is stopped and started."""

    def __init__(self, name: str, spec: ContainerSpec, folder: Path, network: Network) -> None:
        self.name = name
        self.spec = spec
        self._folder = folder
        self._network = network
        self._namespace = network.attach(name)
        self._process: Process | None = None
        self._starts = 0
        for each in ("upper", "work", "merged"):
            (folder / each).mkdir(parents=True)

    def start(self) -> None:
        self._starts += 1
        self._write_names()
        self._process = Process(
            ["ip", "netns", "exec", self._namespace, *self._in_namespaces(self.spec.command)],
            self._overlay(),
            self._folder / f"{self._starts}.log",
        )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log")))

    def wait(self, timeout_s: float = 60) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self, grace_s: float) -> int:
        """SIGTERM to its first process, as an engine sends it. Fails after the grace period."""
        os.kill(self._first_process(), signal.SIGTERM)
        return self.wait(grace_s)

    def kill(self) -> None:
        """With all of its processes."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first_process(), signal.SIGKILL)
            self.wait()

    def execute(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """A command in the running container, as `docker exec` runs it."""
        first = self._first_process()
        inside = ["nsenter", f"--target={first}", "--mount", "--net", "--pid", f"--root=/proc/{first}/root"]
        return subprocess.run(
            [*inside, *self._as_user(command)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def is_healthy(self, check: Healthcheck) -> bool:
        try:
            return self.running and self.execute(*check.command, timeout_s=check.timeout_s).returncode == 0
        except (subprocess.TimeoutExpired, ProcessLookupError, FileNotFoundError):
            return False

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder / "work", ignore_errors=True)

    def _in_namespaces(self, command: Sequence[str]) -> list[str]:
        mounts: list[str] = []
        for place in self.spec.tmpfs:
            mounts += ["tmpfs", place]
        for each in self.spec.mounts:
            mounts += ["bind", str(each.source), each.target, "ro" if each.read_only else "rw"]
        if self.spec.read_only:
            mounts.append("readonly")
        return [
            *("unshare", "--mount", "--propagation", "private", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
            *("sh", "-c", _START, "container", *mounts, "--", *self._as_user(command)),
        ]

    def _as_user(self, command: Sequence[str]) -> list[str]:
        user, group, home = self._account()
        kept = ",".join(["-all", *(f"+{name.lower()}" for name in self.spec.capabilities)])
        words = [
            "/usr/bin/env",
            "-i",
            "--chdir=/",
            "/usr/bin/setpriv",
            f"--reuid={user}",
            f"--regid={group}",
            "--clear-groups",
            f"--bounding-set={kept}",
        ]
        words += ["--inh-caps=-all", *(["--no-new-privs"] if self.spec.no_new_privileges else [])]
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": home, **self.spec.env}
        return [*words, "/usr/bin/env", *(f"{name}={value}" for name, value in env.items()), *command]

    def _account(self) -> tuple[str, str, str]:
        lines = (self.spec.image / "etc" / "passwd").read_text().splitlines()
        fields = next(found for line in lines if (found := line.split(":"))[0] == self.spec.user)
        return fields[2], fields[3], fields[5]

    def _overlay(self) -> dict[str, str]:
        named = {name.upper(): str(self._folder / name) for name in ("upper", "work", "merged")}
        return {"PATH": os.environ["PATH"], "IMAGE": str(self.spec.image), **named}

    def _write_names(self) -> None:
        etc = self._folder / "upper" / "etc"
        etc.mkdir(exist_ok=True)
        names = {"localhost": "127.0.0.1", **self._network.hosts}
        (etc / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        (etc / "resolv.conf").unlink(missing_ok=True)
        (etc / "resolv.conf").touch()  # no network but this one: nobody to ask

    def _first_process(self) -> int:
        assert self._process is not None
        deadline = time.monotonic() + 10
        while True:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            if children:
                return int(children[0])
            if not self._process.running or time.monotonic() > deadline:
                raise ProcessLookupError(f"{self.name} has ended:\n{self.output()[-3000:]}")
            time.sleep(0.02)  # between unshare's start and its fork
