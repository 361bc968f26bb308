"""Commands the probe runs: they may be absent, fail, hang with their children, or print nonsense."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from tests.support.waiting import wait_for
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
    child = tmp_path / "child"
    machine.command("tool", f"/bin/sleep 300 & echo $! > {child}.new; /bin/mv {child}.new {child}; wait")
    for timeout_s in (0.5, 2.0, 8.0):
        started = time.monotonic()
        with capture_logs() as logs:
            assert machine.host(command_timeout_s=timeout_s).run("tool") is None
        assert time.monotonic() - started < timeout_s + 30
        assert logs[0]["why"] == f"no answer within {timeout_s:g} s"
        if child.exists():  # else it was ended before it had started anything, on a machine that busy
            break
    pid = int(child.read_text())
    wait_for(lambda: is_gone(pid), "end of what it started")


def is_gone(pid: int) -> bool:
    """The orphan is reaped by whoever adopts it; a zombie is as good as gone."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
