"""Machines on one switch, on this one: network namespaces, a bridge, and a rate for each link. Needs root.

The rate (`tc tbf`) holds for each direction of each machine's link. Nothing of it is seen outside.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.network import Machine, ip

NETWORK = "10.214.7"
BURST = "256kb"  # above the largest segment that the kernel hands over: it need not be cut
LATENCY = "100ms"
_BRIDGE = "switch"
_END = "cable"


@dataclass
class Star:
    """`with star(rate) as network: machine = network.add()`."""

    name: str
    rate_bytes: float
    opened: contextlib.ExitStack
    switch: Machine
    machines: list[Machine] = field(default_factory=list)
    _limited: list[tuple[str, str]] = field(default_factory=list)  # namespace and device

    def add(self) -> Machine:
        number = len(self.machines) + 2
        namespace, port = f"{self.name}-{number}", f"port{number}"
        ip("netns", "add", namespace)
        machine = Machine(namespace, f"{NETWORK}.{number}")
        self.opened.callback(machine.close)
        self.machines.append(machine)
        peer = ("peer", "name", port, "netns", self.switch.namespace)
        ip("link", "add", _END, "netns", namespace, "type", "veth", *peer)
        self.switch.ip("link", "set", port, "master", _BRIDGE, "up")
        machine.ip("address", "add", f"{machine.address}/24", "dev", _END)
        machine.ip("link", "set", "lo", "up")
        machine.ip("link", "set", _END, "up")
        self._limit(namespace, _END)
        self._limit(self.switch.namespace, port)
        return machine

    def sent_bytes(self, machine: Machine) -> int:
        """All bytes that left the machine, with headers."""
        return int(_run("ip", "netns", "exec", machine.namespace, "cat", f"/sys/class/net/{_END}/statistics/tx_bytes"))

    def set_rate(self, rate_bytes: float) -> None:
        """Of every link, from now on."""
        self.rate_bytes = rate_bytes
        for namespace, device in self._limited:
            self._shape("change", namespace, device)

    @contextlib.contextmanager
    def at_rate(self, rate_bytes: float) -> Iterator[None]:
        """While the block runs."""
        before = self.rate_bytes
        self.set_rate(rate_bytes)
        try:
            yield
        finally:
            self.set_rate(before)

    def _limit(self, namespace: str, device: str) -> None:
        self._shape("add", namespace, device)
        self._limited.append((namespace, device))

    def _shape(self, verb: str, namespace: str, device: str) -> None:
        rate = f"{round(self.rate_bytes * 8)}bit"
        tbf = ("root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
        _run("tc", "-n", namespace, "qdisc", verb, "dev", device, *tbf)


@contextlib.contextmanager
def star(rate_bytes: float) -> Iterator[Star]:
    """`rate_bytes`: per second, of each link. The switch has an address too, and no limit of its own."""
    with contextlib.ExitStack() as opened:
        name = f"corral-{os.getpid()}"
        ip("netns", "add", f"{name}-1")
        switch = Machine(f"{name}-1", f"{NETWORK}.1")
        opened.callback(switch.close)
        switch.ip("link", "add", _BRIDGE, "type", "bridge")
        switch.ip("address", "add", f"{switch.address}/24", "dev", _BRIDGE)
        switch.ip("link", "set", "lo", "up")
        switch.ip("link", "set", _BRIDGE, "up")
        yield Star(name, rate_bytes, opened, switch)


def _run(*words: str) -> str:
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(words)}: {ran.stderr.strip()}")
    return ran.stdout
