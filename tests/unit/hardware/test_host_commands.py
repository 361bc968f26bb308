"""Commands the probe runs: they may be absent, fail, hang with their children, or print nonsense."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from tests.unit.hardware.fake_machine import FakeMachine


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_what_a_command_prints_is_its_answer(machine: FakeMachine) -> None:
    machine.command("tool", 'printf "%s|" "$@"')
    assert machine.host().run("tool", "a b", "c") == "a b|c|"


def test_an_absent_command_is_no_answer_and_no_news(machine: FakeMachine) -> None:
    with capture_logs() as logs:
        assert machine.host().run("tool") is None
    assert logs == []


def test_a_failing_command_is_no_answer_and_told_once(machine: FakeMachine) -> None:
    machine.command("tool", "echo half; exit 3")
    host = machine.host()
    with capture_logs() as logs:
        assert host.run("tool") is None
        assert host.run("tool") is None
    assert [(entry["source"], entry["why"]) for entry in logs] == [("tool", "ended with status 3")]


def test_a_command_that_cannot_be_started_is_no_answer(machine: FakeMachine) -> None:
    path = machine.write("usr/bin/tool", b"\x7fELF nothing of the kind")
    path.chmod(0o755)
    assert machine.host().run("tool") is None


def test_a_hanging_command_is_ended_with_what_it_started(machine: FakeMachine, tmp_path: Path) -> None:
    machine.command("tool", f"/bin/sleep 300 & echo $! > {tmp_path}/child; wait")
    started = time.monotonic()
    with capture_logs() as logs:
        assert machine.host(command_timeout_s=0.5).run("tool") is None
    assert time.monotonic() - started < 20
    assert logs[0]["why"] == "no answer within 0.5 s"
    assert wait_until_gone(int((tmp_path / "child").read_text()))


def wait_until_gone(pid: int, within_s: float = 10.0) -> bool:
    """The orphan is reaped by whoever adopts it; a zombie is as good as gone."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_commands_see_no_secrets_of_ours(machine: FakeMachine) -> None:
    machine.env.update(CORRAL_TOKEN="cj_secret", LD_LIBRARY_PATH="/opt/lib")
    machine.command("tool", "/usr/bin/env")
    printed = machine.host().run("tool") or ""
    assert "cj_secret" not in printed
    assert "LD_LIBRARY_PATH=/opt/lib" in printed
    assert "LC_ALL=C" in printed


@pytest.mark.parametrize(
    ("system", "machine_name", "os", "arch"),
    [
        ("Linux", "x86_64", "linux", "amd64"),
        ("Linux", "aarch64", "linux", "arm64"),
        ("Linux", "AMD64", "linux", "amd64"),
        ("Darwin", "arm64", "darwin", "arm64"),
        ("Darwin", "x86_64", "darwin", "amd64"),
        ("Linux", "riscv64", "linux", "riscv64"),
    ],
)
def test_platforms_are_named_as_in_image_indexes(
    tmp_path: Path, system: str, machine_name: str, os: str, arch: str
) -> None:
    host = FakeMachine(tmp_path, system=system, machine=machine_name).host()
    assert (host.os, host.arch) == (os, arch)
