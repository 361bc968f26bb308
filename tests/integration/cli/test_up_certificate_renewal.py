"""The server certificate of a fleet that runs on: renewed in time, and those who use it are told."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from corral.cli.common.data_folder import DataFolder
from corral.cli.up import prepare
from corral.cli.up.certificate_renewal import CertificateRenewal
from corral.cli.up.children import ChildSpec
from corral.cli.up.supervisor import Supervisor
from corral.kit.certificates import expires_at, subject_names
from corral.kit.clock import SystemClock
from tests.support.waiting import until

NAMES = ("localhost", "127.0.0.1", "192.168.7.5")
LISTENER = """
import signal
signal.signal(signal.SIGHUP, lambda *_: print("hup", flush=True))
print("here", flush=True)
while True:
    signal.pause()
"""


class LaterClock(SystemClock):
    def __init__(self) -> None:
        self.later = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.later


async def test_renewed_when_it_nears_its_end_or_the_main_address_changed(tmp_path: Path) -> None:
    folder, clock, reported = DataFolder(tmp_path), LaterClock(), list[str]()
    prepare.make_folders(folder)
    prepare.make_certificates(folder, NAMES, clock.now())
    main = ["192.168.7.5"]
    async with Supervisor(folder.logs, clock=clock, report=reported.append) as supervisor:
        for name in ("bus", "gateway"):
            command = (sys.executable, "-I", "-c", LISTENER)
            supervisor.start(ChildSpec(name, command, {"PATH": os.environ["PATH"]}, 5.0))
        logs = [folder.logs / f"{name}.log" for name in ("bus", "gateway")]
        await until(lambda: all("here" in log.read_text() for log in logs))
        renewal = CertificateRenewal(folder, lambda: NAMES, supervisor, clock, reported.append, main=lambda: main[0])
        assert renewal.run_once() is False

        clock.later = expires_at(folder.server_cert.read_text()) - datetime.now(UTC) - timedelta(days=29)
        assert renewal.run_once() is True
        assert expires_at(folder.server_cert.read_text()) - clock.now() > timedelta(days=300)
        await until(lambda: "hup" in logs[0].read_text() and logs[1].read_text().count("here") == 2)
        assert renewal.run_once() is False

        main[0] = "10.9.8.7"
        assert renewal.run_once() is True
        assert "10.9.8.7" in subject_names(folder.server_cert.read_text())
    assert reported.count("renewed the server certificate; the gateway restarts to use it") == 2
    assert supervisor.children["bus"].starts == 1


async def test_what_cannot_be_renewed_is_told_and_tried_again(tmp_path: Path) -> None:
    folder, reported = DataFolder(tmp_path), list[str]()
    prepare.make_folders(folder)
    prepare.make_certificates(folder, NAMES, datetime.now(UTC))
    folder.ca_key.unlink()
    supervisor = Supervisor(folder.logs, clock=SystemClock(), report=reported.append)
    renewal = CertificateRenewal(
        folder, lambda: NAMES, supervisor, SystemClock(), reported.append, main=lambda: "10.9.8.7"
    )
    running = asyncio.create_task(renewal.run(0.01))
    await until(lambda: len(reported) >= 2)
    running.cancel()
    assert "cannot renew" in reported[0]
