"""The one public port of a fleet while the gateway behind it is killed: connections wait, none is refused."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.fleet import Fleet
from tests.support.waiting import wait_for

KILLS = 10
VISITORS = 4
CONNECT_S = 2.0
ANSWER_S = 60.0  # a slow machine starts processes slowly; what is measured is whether anybody is refused


@dataclass
class Visitors:
    """One new connection after the other, each with one request."""

    port: int
    answered: int = 0
    resets: list[tuple[float, float]] = field(default_factory=list)  # when such a request began, and was cut off
    faults: list[str] = field(default_factory=list)
    over: bool = False

    def run(self) -> None:
        while not self.over:
            began = time.monotonic()
            try:
                self._visit()
            except (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected, http.client.BadStatusLine):
                self.resets.append((began, time.monotonic()))
            except OSError as error:
                self.faults.append(repr(error))

    def _visit(self) -> None:
        # Connecting on its own first: a refusal or a wait there is what this is about.
        with socket.create_connection(("127.0.0.1", self.port), timeout=CONNECT_S) as connection:
            connection.settimeout(ANSWER_S)
            client = http.client.HTTPConnection("127.0.0.1", self.port)
            client.sock = connection
            client.request("GET", "/healthz")
            assert client.getresponse().read() == b"ok\n"
            self.answered += 1


def gateways_of(fleet: Fleet) -> list[psutil.Process]:
    assert fleet.up is not None
    found = []
    for child in psutil.Process(fleet.up.pid).children():
        with suppress(psutil.Error):  # it has just ended
            if child.cmdline()[-1:] == ["gateway"]:
                found.append(child)
    return found


def test_ten_kills_of_the_gateway_refuse_no_connection(tmp_path: Path) -> None:
    with closing(Fleet(tmp_path, "--no-worker").start()) as fleet:
        visitors = Visitors(fleet.port)
        threads = [threading.Thread(target=visitors.run) for _ in range(VISITORS)]
        deaths: list[tuple[float, float]] = []  # each from the signal to the process's end
        for thread in threads:
            thread.start()
        try:
            for _ in range(KILLS):
                (gateway,) = wait_for(lambda: gateways_of(fleet), "gateway")
                seen = visitors.answered
                wait_for(lambda seen=seen: visitors.answered > seen + 20, "answers")  # type: ignore[misc]
                killed = time.monotonic()
                os.kill(gateway.pid, signal.SIGKILL)
                gateway.wait(60)
                deaths.append((killed, time.monotonic()))
            wait_for(lambda: fleet.http("GET", "/readyz").status == 200, "a gateway that is back")
        finally:
            visitors.over = True
            for thread in threads:
                thread.join()
        assert visitors.faults == []
        for began, cut_off in visitors.resets:  # only what a dying process had accepted
            assert any(began <= ended and killed <= cut_off for killed, ended in deaths)
        assert len(visitors.resets) <= KILLS * VISITORS
        waits = [line for line in (fleet.data / "logs" / "up.log").read_text().splitlines() if "gateway ended" in line]
        assert len(waits) == KILLS
        for line in waits:
            assert line.endswith("restarting now") or float(line.split()[-2]) <= 1.0, line
