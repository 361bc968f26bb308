"""The lines of `corral join`."""

from __future__ import annotations

from dataclasses import dataclass

from corral.cli.nodes.join_progress import BUS_PATIENCE_S, JoinProgress


@dataclass
class FakeStatus:
    name: str = "attic"
    controller: str = "https://fleet:8080"
    status: str = ""
    bus_urls: tuple[str, ...] = ()
    ingress_url: str = ""
    is_ingress_ok: bool | None = None
    ingress_error: str = ""
    is_bus_up: bool = False

    def not_ready_reason(self) -> str | None:
        return None if self.is_bus_up else "the bus is down"


def said(progress: JoinProgress, status: FakeStatus, at: float = 0.0) -> list[str]:
    return list(progress.lines(status, at))


def test_four_lines_each_once() -> None:
    progress, status = JoinProgress(), FakeStatus()
    assert said(progress, status) == ["Connecting to https://fleet:8080"]
    assert said(progress, status) == []
    status.status = "pending"
    assert said(progress, status) == ["Waiting for approval: run `corral nodes approve attic` on the fleet"]
    status.status, status.bus_urls = "healthy", ("tls://fleet:4222",)
    assert said(progress, status) == ["Approved as attic"]
    status.is_bus_up = True
    assert said(progress, status) == ["Ready. Ctrl-C stops the worker; `corral worker` starts it again"]
    assert not progress.is_done
    status.ingress_url, status.is_ingress_ok = "https://10.0.0.7:50050", True
    assert said(progress, status) == []
    assert progress.is_done


def test_a_pre_approved_node_does_not_wait() -> None:
    progress = JoinProgress()
    assert said(progress, FakeStatus(status="healthy", is_bus_up=True)) == [
        "Approved as attic",
        "Ready. Ctrl-C stops the worker; `corral worker` starts it again",
    ]


def test_a_name_that_the_shell_would_split_is_quoted() -> None:
    (line,) = said(JoinProgress(), FakeStatus(status="pending", name="my node"))
    assert "`corral nodes approve 'my node'`" in line


def test_a_blocked_bus_is_named_after_a_moment_with_what_opens_it() -> None:
    progress, status = JoinProgress(), FakeStatus(status="healthy", bus_urls=("tls://fleet:4223",))
    assert said(progress, status, 100.0) == ["Approved as attic"]
    assert said(progress, status, 100.0 + BUS_PATIENCE_S - 0.1) == []
    (line,) = said(progress, status, 100.0 + BUS_PATIENCE_S)
    assert line == (
        "The fleet answers, but not its bus, fleet port 4223: open TCP port 4223 on fleet "
        "(`sudo ufw allow 4223/tcp` or `sudo firewall-cmd --add-port=4223/tcp`). Trying again"
    )
    assert said(progress, status, 200.0) == []


def test_a_blocked_ingress_is_named_and_so_is_its_end() -> None:
    progress = JoinProgress()
    status = FakeStatus(status="healthy", is_bus_up=True, ingress_url="https://10.0.0.7:50051")
    said(progress, status)
    status.is_ingress_ok, status.ingress_error = False, "it does not answer"
    (line,) = said(progress, status)
    assert line.startswith("The fleet cannot reach this machine at https://10.0.0.7:50051: open TCP port 50051 here (")
    assert line.endswith("or give the address that it can reach with --advertise")
    assert not progress.is_done
    status.is_ingress_ok, status.ingress_error = True, ""
    assert said(progress, status) == ["The fleet reaches this machine at https://10.0.0.7:50051 now"]
    assert progress.is_done
