"""`corral service` and `corral join --service` with a systemctl and a launchctl that note what they are asked."""

from __future__ import annotations

import json
import os
import plistlib
import stat
import sys
from pathlib import Path

import pytest

from corral.cli.main import main
from corral.cli.service import command, install, managers

TOKEN = "cj_" + "a" * 52
_SYSTEMCTL = """#!/bin/sh
echo "$*" >>{log}
case "$*" in
  *restart*) [ ! -e {broken} ] || {{ echo "Job for the unit failed" >&2; exit 1; }} ;;
  *show*) cat {state} ;;
esac
"""
_LAUNCHCTL = """#!/bin/sh
echo "$*" >>{log}
case "$*" in print*) printf 'state = running\\npid = 77\\n' ;; esac
"""


class System:
    """A machine of which the test is an ordinary user."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.units = root / "config" / "systemd" / "user"
        self.log, self.broken, self.state = root / "log", root / "broken", root / "state"
        self.log.touch()
        self.set_state("active")
        tools = root / "tools"
        tools.mkdir()
        for name, text in (("systemctl", _SYSTEMCTL), ("launchctl", _LAUNCHCTL), ("loginctl", "#!/bin/sh\n")):
            path = tools / name
            path.write_text(text.format(log=self.log, broken=self.broken, state=self.state))
            path.chmod(0o755)

    def set_state(self, state: str) -> None:
        self.state.write_text(f"ActiveState={state}\nSubState=x\nUnitFileState=enabled\nMainPID=4711\n")

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    machine = System(tmp_path)
    for name in [name for name in os.environ if name.startswith("CORRAL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(managers, "BOOTED", tmp_path)
    return machine


def test_a_service_is_installed_changed_shown_and_removed(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "install", "--set", "CORRAL_LAN=true"]) == 0
    told = capsys.readouterr()
    unit, settings = system.units / "corral.service", system.root / "config" / "corral" / "up.env"
    assert told.out == "corral runs, and starts with the machine\n"
    assert (f"wrote {unit}" in told.err, "Logs: journalctl --user -u corral" in told.err) == (True, True)
    assert f"EnvironmentFile=-{settings}" in unit.read_text()
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    asked = ["--user daemon-reload", "--user enable corral.service", "--user restart corral.service"]
    assert system.calls[:3] == asked

    assert main(["service", "install", "--set", "CORRAL_PORT=8088"]) == 0
    assert settings.read_text().splitlines()[1:] == ["CORRAL_LAN=true", "CORRAL_PORT=8088"]

    capsys.readouterr()
    assert main(["service", "status", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["role"], shown["state"], shown["pid"], shown["is_enabled"]) == ("up", "active", 4711, True)

    assert main(["service", "uninstall"]) == 0
    assert "corral uninstalled" in capsys.readouterr().out
    assert (unit.exists(), settings.exists()) == (False, True)
    assert "--user disable --now corral.service" in system.calls
    assert main(["service", "uninstall"]) == 0
    assert capsys.readouterr().err == "corral is not installed.\n"


def test_a_socket_unit_is_removed_with_its_service(system: System) -> None:
    assert main(["service", "install", "--socket", "127.0.0.1:8080"]) == 0
    assert (system.units / "corral.socket").exists()
    assert "--user restart corral.socket corral.service" in system.calls
    assert main(["service", "uninstall"]) == 0
    assert list(system.units.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["worker"], 1, "no worker has joined a fleet with"),
        (["--set", "CORRAL_LAN=maybe"], 2, "CORRAL_LAN: 'maybe' is neither true nor false"),
        (["--set", "CORRAL_NO_SUCH=1"], 1, "no setting CORRAL_NO_SUCH"),
        (["worker", "--socket", "127.0.0.1:1"], 1, "--socket is for up and gateway"),
        (["gateway"], 2, "--controller (or CORRAL_CONTROLLER) is required"),
        (["bus"], 1, "no service 'bus': the services are up, worker, controller, gateway"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    system: System, capsys: pytest.CaptureFixture[str], words: list[str], code: int, sentence: str
) -> None:
    assert main(["service", "install", *words]) == code
    assert sentence in capsys.readouterr().err
    assert (system.calls, system.units.exists()) == ([], False)


def test_without_systemd_the_files_can_be_printed_and_are_not_written(
    system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managers, "BOOTED", system.root / "absent")
    assert main(["service", "install"]) == 1
    assert "systemd does not run on this machine: `--dry-run` prints the files" in capsys.readouterr().err
    assert main(["service", "install", "--dry-run"]) == 0
    assert f"# {system.units}/corral.service\n" in capsys.readouterr().out
    assert not system.units.exists()


def test_a_unit_of_somebody_else_is_left_alone(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    system.units.mkdir(parents=True)
    (system.units / "corral.service").write_text("[Service]\nExecStart=/bin/mine\n")
    assert main(["service", "install"]) == 1
    assert "is not of `corral service`: move it away first" in capsys.readouterr().err
    assert "mine" in (system.units / "corral.service").read_text()
    assert main(["service", "uninstall"]) == 1
    assert (system.units / "corral.service").exists()


def test_a_service_that_does_not_start_says_where_its_log_is(
    system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "START_S", 0.2)
    system.set_state("failed")
    assert main(["service", "install"]) == 1
    assert "corral does not run (failed): see `journalctl --user -u corral`" in capsys.readouterr().err
    assert main(["service", "status"]) == 1
    system.broken.touch()
    assert main(["service", "install"]) == 1
    assert "Job for the unit failed" in capsys.readouterr().err


def test_a_corral_from_the_cache_of_uvx_is_no_service(
    system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "find_program", lambda: Path("/x/uv/archive-v0/abc/bin/corral"))
    assert main(["service", "install"]) == 1
    assert "is no lasting installation: run `uv tool install WHEEL`" in capsys.readouterr().err


def test_the_path_of_an_installer_is_the_one_that_upgrades_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "versions" / "0123"
    version.mkdir(parents=True)
    (tmp_path / "current").symlink_to(version)
    monkeypatch.setattr(sys, "prefix", str(version))
    assert install.find_program() == tmp_path / "current" / "bin" / "corral"


def test_a_joining_worker_becomes_a_service(
    system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = system.root / "worker"
    monkeypatch.setenv("CORRAL_TOKEN", TOKEN)
    joined = ["join", "http://fleet:8080", "--data", str(data), "--name", "attic", "--labels", "a=b", "--service"]
    assert main(joined) == 0
    assert TOKEN not in "".join(capsys.readouterr())
    settings = (system.root / "config" / "corral" / "worker.env").read_text()
    assert {"CORRAL_CONTROLLER=http://fleet:8080", "CORRAL_NAME=attic"} <= set(settings.splitlines())
    assert TOKEN not in settings
    assert (data / "join.token").read_text() == f"{TOKEN}\n"
    assert stat.S_IMODE((data / "join.token").stat().st_mode) == 0o600
    assert json.loads((data / "settings.json").read_bytes()) == {"labels": "a=b"}
    assert f"Environment=CORRAL_DATA={data}" in (system.units / "corral-worker.service").read_text()


def test_launchd_gets_its_list_and_is_asked_to_load_it(
    system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_manager", managers.Launchd)
    assert main(["service", "install", "--set", "CORRAL_LAN=true"]) == 0
    file = system.root / "home" / "Library" / "LaunchAgents" / "org.corral.up.plist"
    assert plistlib.loads(file.read_bytes())["EnvironmentVariables"]["CORRAL_LAN"] == "true"
    assert f"bootstrap gui/{os.getuid()} {file}" in system.calls
    capsys.readouterr()
    assert main(["service", "status", "up", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["pid"]) == ("active", 77)
    assert main(["service", "uninstall"]) == 0
    assert not file.exists()
