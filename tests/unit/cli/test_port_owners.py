"""Whose a port is: ours in every way a fleet can be started, or a stranger's."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from corral.cli.common.data_folder import DataFolder, lock_file
from corral.cli.common.port_owners import Owner, Program, choose_owner
from corral.cli.doctor.port_checks import check_ports
from corral.client.contexts import LocalFleet, claim_context

ME, OTHER = 1000, 2000
LISTEN = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("/usr/bin/python3 -P -m corral.cli.main gateway --port 8080", "gateway"),
        ("/opt/venv/bin/python /usr/local/bin/corral up", "up"),
        ("/usr/local/bin/corral worker --data /var/lib/corral/worker", "worker"),
        ("corral join https://fleet:8080 --ca sha256:00", "join"),
        ("corral nodes show gateway", ""),
        ("vi worker", ""),
        ("nats-server --config /var/lib/corral/data/bus/nats.conf", ""),
        ("", ""),
    ],
)
def test_which_role_a_command_line_runs(command: str, role: str) -> None:
    assert Program(1, ME, tuple(command.split())).role == role


def programs(*given: tuple[int, int, str, int]) -> dict[int, Program]:
    return {pid: Program(pid, uid, tuple(command.split()), parent) for pid, uid, command, parent in given}


HERE = programs(
    (10, ME, "corral up", 1),
    (11, ME, "nats-server --config x", 10),
    (12, ME, "python -m corral.cli.main gateway", 10),
    (13, ME, "python -c child", 12),
    (20, ME, "nginx", 1),
)
SINGLE = programs((30, ME, "corral worker", 1), (31, ME, "nats-server", 1))
AS_A_SERVICE = programs(
    (1, 0, "/sbin/init", 0), (40, OTHER, "corral up", 1), (41, OTHER, "nats-server", 40), (42, ME, "corral worker", 1)
)


@pytest.mark.parametrize(
    ("port", "purpose", "pid", "there", "owner"),
    [
        (8080, "--port", 12, HERE, Owner("`corral gateway` (pid 12)", True)),
        (8080, "--port", 13, HERE, Owner("`corral gateway` (pid 13)", True)),  # one process of several
        (4222, "--bus-port", 11, HERE, Owner("`corral up` (pid 11)", True)),
        (8080, "--port", 20, HERE, Owner("nginx (pid 20)", False)),
        (50050, "--ingress-port", 30, SINGLE, Owner("`corral worker` (pid 30)", True)),
        (4222, "--bus-port", 31, SINGLE, Owner("nats-server (pid 31)", True)),  # a bus beside roles
        (4222, "--bus-port", 31, programs((31, ME, "nats-server", 1)), Owner("nats-server (pid 31)", False)),
        (8080, "--port", None, AS_A_SERVICE, Owner("`corral up` (pid 40), most likely", True)),
        (4222, "--bus-port", None, AS_A_SERVICE, Owner("`corral up` (pid 40), most likely", True)),
        (8080, "--port", None, HERE, None),  # were it one of ours, we would know its pid
        (8080, "--port", None, SINGLE, None),
        (8080, "--port", 99, HERE, Owner("an unknown program (pid 99)", False)),
    ],
)
def test_who_has_a_port(port: int, purpose: str, pid: int | None, there: dict[int, Program], owner: Owner) -> None:
    assert choose_owner(port, purpose, [(port, pid), (9999, 20)], there, us=ME) == owner


def test_where_no_listener_can_be_seen_our_own_roles_count_too() -> None:
    assert choose_owner(50050, "--ingress-port", [], SINGLE, us=None) == Owner(
        "`corral worker` (pid 30), most likely", True
    )


@contextmanager
def listening_as(*words: str) -> Iterator[int]:
    """A process with this command line that listens on a port."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate()


@pytest.mark.parametrize(
    ("words", "level"),
    [(("corral", "gateway"), "ok"), (("corral", "join", "URL"), "ok"), (("another", "program"), "warn")],
)
def test_doctor_warns_of_strangers_only(tmp_path: Path, words: tuple[str, ...], level: str) -> None:
    env = {"CORRAL_CONFIG_DIR": str(tmp_path / "config")}
    with listening_as(*words) as port:
        (found,) = check_ports(DataFolder(tmp_path), env, ((port, "--port"),))
        assert found.level == level
        assert (f"`corral {words[1]}`" in found.seen) == (level == "ok")
    (found,) = check_ports(DataFolder(tmp_path), env, ((port, "--port"),))
    assert found.seen == f"{port} is free"


def test_doctor_knows_the_ports_of_a_fleet_in_another_folder_by_its_context(tmp_path: Path) -> None:
    env = {"CORRAL_CONFIG_DIR": str(tmp_path / "config")}
    (tmp_path / "farm").mkdir()
    other = DataFolder(tmp_path / "farm")
    with closing(socket.create_server(("127.0.0.1", 0))) as gateway, lock_file(other.lock):
        port = gateway.getsockname()[1]
        claim_context(env, LocalFleet(url=f"http://127.0.0.1:{port}", data=str(other.root)), "farm")
        (found,) = check_ports(DataFolder(tmp_path / "mine"), env, ((port, "--port"),))
        assert (found.level, found.seen) == ("ok", f"{port} is used by the fleet of context 'farm'")
        other.ports.write_text('{"--ingress-port": 1}')
        (found,) = check_ports(other, env, ((port, "--port"),))
        assert found.seen.startswith("`corral up` runs with this data folder")
