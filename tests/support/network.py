"""Two machines and the cable between them, on this one: network namespaces and a pair of virtual ends. Needs root.

Nothing of it is seen outside: the ends are made inside the namespaces, and so are the addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_END = "cable"
_numbers = itertools.count()


def ip(*words: str) -> None:
    ran = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, f"ip {' '.join(words)}: {ran.stderr}"


class Machine:
    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address
        self.prefix = ("ip", "netns", "exec", namespace)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=namespace, initializer=self.enter)

    def run(self, work: Callable[[], T]) -> T:
        """Do something of this process there: a thread can be on another network than its neighbours."""
        return self._thread.submit(work).result(timeout=60)

    def ip(self, *words: str) -> None:
        ip("-n", self.namespace, *words)

    def close(self) -> None:
        self._thread.shutdown()
        ip("netns", "delete", self.namespace)

    def enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(Path("/run/netns") / self.namespace, os.O_RDONLY)
        try:
            if libc.setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
        finally:
            os.close(descriptor)


class Lan:
    """`here` and `there`, joined."""

    def __init__(self, here: Machine, there: Machine) -> None:
        self.here = here
        self.there = there

    def cut(self) -> None:
        self.there.ip("link", "set", _END, "down")

    def mend(self) -> None:
        self.there.ip("link", "set", _END, "up")


@contextlib.contextmanager
def two_machines() -> Iterator[Lan]:
    number = next(_numbers)
    with contextlib.ExitStack() as made:
        machines = [
            _machine(made, f"corral-{os.getpid()}-{number}-{side}", f"10.213.7.{host}")
            for side, host in (("here", 1), ("there", 2))
        ]
        here, there = machines
        ip(
            *("link", "add", _END, "netns", here.namespace),
            *("type", "veth", "peer", "name", _END, "netns", there.namespace),
        )
        for machine in machines:
            machine.ip("address", "add", f"{machine.address}/24", "dev", _END)
            machine.ip("link", "set", _END, "up")
        yield Lan(here, there)


def _machine(made: contextlib.ExitStack, namespace: str, address: str) -> Machine:
    ip("netns", "add", namespace)
    machine = Machine(namespace, address)
    made.callback(machine.close)
    machine.ip("link", "set", "lo", "up")
    return machine
