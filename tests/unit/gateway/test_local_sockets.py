"""Which nodes the gateway tries to reach through unix sockets: those whose address is this machine's."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from corral.contract.http import Target
from corral.gateway.routing import local_sockets
from corral.gateway.routing.local_sockets import LocalSockets, is_this_machine
from corral.gateway.settings import GatewaySettings
from corral.kit.errors import Invalid
from corral.kit.settings import BadSettings, read_settings

ELSEWHERE = "192.0.2.7"  # no machine has it


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_this_machine(host)


@pytest.mark.parametrize("host", [ELSEWHERE, "2001:db8::7", "barn", "", "no such\0host", "fe80::1%nowhere"])
def test_other_addresses_and_names_are_not(host: str) -> None:
    assert not is_this_machine(host)


def test_an_address_that_the_kernel_lets_us_use_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[object] = []

    class Probe(socket.socket):
        def bind(self, address: object) -> None:
            bound.append(address)

    monkeypatch.setattr(socket, "socket", Probe)
    assert is_this_machine(ELSEWHERE)
    assert bound == [(ELSEWHERE, 0)]


def test_the_socket_is_added_to_the_address(short_folder: Path) -> None:
    sockets = LocalSockets(short_folder, Clock())
    near = sockets.add_to(Target("127.0.0.1", 50050), "n1")
    assert near == Target("127.0.0.1", 50050, unix_path=str(short_folder / "n1-50050.sock"))
    secure = sockets.add_to(Target("127.0.0.1", 50050, tls=True, server_name="n1"), "n1")
    assert (secure.tls, secure.server_name, secure.unix_path) == (True, "n1", near.unix_path), "for the fallback"


def test_a_node_elsewhere_is_reached_by_its_address_alone(short_folder: Path) -> None:
    """`corral nodes replace` gives a machine elsewhere the id that a worker here had."""
    far = Target(ELSEWHERE, 50050)
    assert LocalSockets(short_folder, Clock()).add_to(far, "n1") == far


def test_an_id_that_cannot_name_a_file_is_reached_by_its_address(short_folder: Path) -> None:
    near = Target("127.0.0.1", 50050)
    assert LocalSockets(short_folder, Clock()).add_to(near, "../n1") == near


def test_addresses_are_looked_up_again_after_a_while(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here: set[str] = set()
    asked: list[str] = []

    def look_up(host: str) -> bool:
        asked.append(host)
        return host in here

    monkeypatch.setattr(local_sockets, "is_this_machine", look_up)
    clock = Clock()
    sockets = LocalSockets(short_folder, clock)
    far = Target(ELSEWHERE, 1)
    assert [sockets.add_to(far, "n1").unix_path for _ in range(3)] == [""] * 3
    assert asked == [ELSEWHERE]
    here.add(ELSEWHERE)  # the machine's network is up by now
    clock.now += 61
    assert sockets.add_to(far, "n1").unix_path


def test_the_folder_is_made_private(short_folder: Path) -> None:
    LocalSockets(short_folder / "a" / "s", Clock())
    assert stat.S_IMODE((short_folder / "a" / "s").stat().st_mode) == 0o700
    (short_folder / "file").write_text("")
    with pytest.raises(Invalid, match="--local-sockets: cannot create the folder"):
        LocalSockets(short_folder / "file" / "s", Clock())


def test_a_folder_that_others_can_open_stops_the_start(short_folder: Path) -> None:
    flags = {"controller": "unix:/c", "local_sockets": str(short_folder)}
    short_folder.chmod(0o755)
    with pytest.raises(BadSettings, match=r"--local-sockets: other users can open .*chmod 700"):
        read_settings(GatewaySettings, flags=flags, env={})
    short_folder.chmod(0o700)
    assert read_settings(GatewaySettings, flags=flags, env={}).local_sockets == short_folder
