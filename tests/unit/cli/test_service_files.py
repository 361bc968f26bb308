"""The units of systemd and the property lists of launchd, as these two read them."""

from __future__ import annotations

import configparser
import json
import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from corral.cli.service.plists import property_list
from corral.cli.service.service import ROLES, Service, parse_settings, read_assignments, settings_text
from corral.cli.service.units import unit_files
from corral.kit.errors import Invalid

ANALYZE = shutil.which("systemd-analyze")
MAX_EXPOSURE = {"up": 4.5, "worker": 4.5, "controller": 2.5, "gateway": 2.5}  # of 10; an own unit without any has 9.6


def make_service(role: str, *, is_system: bool = True, program: str = "/opt/corral/bin/corral", **more: str) -> Service:
    return Service(
        role=role,
        program=Path(program),
        data=Path("/var/lib/corral") / role,
        home=Path("/root") if is_system else Path("/home/ann"),
        config=Path("/root/.config/corral"),
        env_file=Path("/etc/corral") / f"{role}.env",
        is_system=is_system,
        settings={"CORRAL_LABELS": "tier=fast"},
        **more,
    )


def lines(service: Service) -> list[str]:
    return unit_files(service)[f"{service.name}.service"].splitlines()


def runnable(service: Service, folder: Path) -> list[Path]:
    """The units with a program and users that are on every machine: systemd looks for both."""
    written = []
    for name, text in unit_files(service).items():
        path = folder / name
        path.write_text(text.replace(str(service.program), "/bin/true").replace("User=corral\n", "User=root\n"))
        written.append(path)
    return written


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize("scope", ["--system", "--user"])
def test_systemd_reads_every_unit_without_a_complaint(tmp_path: Path, scope: str) -> None:
    files = [
        path
        for role in ROLES
        for path in runnable(
            make_service(
                role, is_system=scope == "--system", address="[::1]:8080" if role in ("up", "gateway") else ""
            ),
            tmp_path,
        )
    ]
    assert ANALYZE is not None
    checked = subprocess.run(
        [ANALYZE, "verify", scope, *map(str, files)], capture_output=True, text=True, timeout=60, check=False
    )
    assert [line for line in checked.stderr.splitlines() if "corral" in line] == []


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize("role", ROLES)
def test_the_sandbox_is_rated_by_systemd(tmp_path: Path, role: str) -> None:
    (file,) = runnable(make_service(role), tmp_path)
    assert ANALYZE is not None
    rated = subprocess.run(
        [ANALYZE, "security", "--offline=true", f"--threshold={MAX_EXPOSURE[role] * 10:g}", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Overall exposure level" in rated.stdout, rated.stderr
    assert rated.returncode == 0, rated.stdout


@pytest.mark.parametrize("role", ["up", "worker"])
def test_a_service_that_runs_backends_leaves_them_devices_and_outlives_a_crash(role: str) -> None:
    found = lines(make_service(role))
    assert "KillMode=process" in found
    assert not {"PrivateDevices=yes", "ProtectClock=yes", "MemoryDenyWriteExecute=yes"} & set(found)
    assert [line for line in found if line.startswith("User=")] == [], "only root can give backends a user of their own"
    assert (
        "CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER CAP_KILL CAP_SETGID CAP_SETUID CAP_SYS_PTRACE"
        in found
    )


def test_only_the_worker_can_be_replaced_without_a_gap() -> None:
    reloads = {role: [line for line in lines(make_service(role)) if line.startswith("ExecReload=")] for role in ROLES}
    assert reloads == {
        "up": [],
        "worker": ["ExecReload=/opt/corral/bin/corral worker reload"],
        "controller": [],
        "gateway": [],
    }


@pytest.mark.parametrize("role", ["controller", "gateway"])
def test_other_roles_have_a_user_and_no_rights(role: str) -> None:
    assert {"User=corral", "CapabilityBoundingSet=", "PrivateDevices=yes"} <= set(lines(make_service(role)))


def test_a_service_from_a_folder_of_versions_may_build_the_next_one() -> None:
    program = "/var/lib/corral/corral/current/bin/corral"
    for role in ("up", "worker"):
        assert "ReadWritePaths=-/var/lib/corral/corral" in lines(make_service(role, program=program))
        assert "ReadWritePaths=-/var/lib/corral/corral" not in lines(make_service(role))
    assert "ReadWritePaths=-/var/lib/corral/corral" not in lines(make_service("controller", program=program))


def test_a_service_of_a_user_asks_for_nothing_that_only_root_may() -> None:
    found = lines(make_service("worker", is_system=False))
    assert "WantedBy=default.target" in found
    assert not [line for line in found if line.startswith(("User=", "ProtectSystem=", "CapabilityBoundingSet="))]


def test_paths_with_blanks_and_signs_of_systemd_stay_whole() -> None:
    (start,) = (
        line for line in lines(make_service("up", program="/opt/a b/50%/$x/corral")) if line.startswith("ExecStart=")
    )
    assert start == 'ExecStart="/opt/a b/50%%/$$x/corral" up'


def test_the_socket_unit_belongs_to_its_service() -> None:
    files = unit_files(make_service("gateway", address="0.0.0.0:443"))
    assert list(files) == ["corral-gateway.service", "corral-gateway.socket"]
    parser = configparser.ConfigParser()
    parser.read_string(files["corral-gateway.socket"])
    assert parser["Socket"]["ListenStream"] == "0.0.0.0:443"


@pytest.mark.parametrize("role", ROLES)
def test_launchd_can_read_every_property_list(role: str) -> None:
    found = plistlib.loads(property_list(make_service(role)))
    assert found["Label"] == f"org.corral.{role}"
    assert found["ProgramArguments"] == ["/opt/corral/bin/corral", role]
    assert found["EnvironmentVariables"]["CORRAL_LABELS"] == "tier=fast"
    assert (found["RunAtLoad"], found["KeepAlive"]) == (True, True)
    assert found["StandardErrorPath"] == f"/Library/Logs/Corral/{role}.log"
    assert json.dumps(found), "only plain types"


def test_changed_settings_keep_the_other_lines_of_the_file() -> None:
    before = "# mine\nCORRAL_LABELS=a=b\nCORRAL_NAME=attic\n"
    after = settings_text(before, {"CORRAL_LABELS": "c=d", "CORRAL_VRAM_BUDGET": "8 GB"})
    assert after == '# mine\nCORRAL_LABELS=c=d\nCORRAL_NAME=attic\nCORRAL_VRAM_BUDGET="8 GB"\n'
    assert parse_settings(after) == {"CORRAL_LABELS": "c=d", "CORRAL_NAME": "attic", "CORRAL_VRAM_BUDGET": "8 GB"}


@pytest.mark.parametrize("word", ["CORRAL_LAN", "lan=true", "CORRAL_LANE=true", "CORRAL_LAN=a'b", "CORRAL_LAN=a\nB=c"])
def test_a_setting_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(Invalid):
        read_assignments([word], frozenset({"CORRAL_LAN"}))
