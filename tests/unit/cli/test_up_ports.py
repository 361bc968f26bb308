"""Ports a person named are used or refused; others move when they are taken, and are found again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.cli.common.data_folder import DataFolder
from corral.cli.up.ports import choose_ports, read_ports, save_ports
from corral.cli.up.settings import UpSettings
from corral.kit.errors import Failed

HERE = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((HERE, 0)) as server:
        yield int(server.getsockname()[1])


def test_a_named_port_that_is_taken_is_refused_by_its_flag(taken: int) -> None:
    with pytest.raises(Failed, match="--bus-port"):
        choose_ports(UpSettings(port=0, bus_port=taken), HERE, remembered={})


def test_a_port_nobody_named_moves_when_it_is_taken(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = dict.fromkeys(("--bus-port", "--blob-port", "--ingress-port"), taken)
    monkeypatch.setattr("corral.cli.up.ports._DEFAULTS", usual)
    ports = choose_ports(UpSettings(port=0), HERE, remembered={})
    assert set(ports) == {"--port", "--bus-port", "--blob-port", "--ingress-port"}
    assert taken not in ports.values()
    assert len(set(ports.values())) == 4


def test_what_was_used_last_is_used_again(tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_host: str, port: int, flag: str) -> None:
        if port == taken:
            raise Failed(flag)

    monkeypatch.setattr("corral.cli.up.machine.check_port", check)  # the system gives a free one to whoever comes first
    folder = DataFolder(tmp_path)
    assert read_ports(folder) == {}
    first = choose_ports(UpSettings(port=0, bus_port=0), HERE, remembered={})
    save_ports(folder, first)
    again = choose_ports(UpSettings(port=0), HERE, remembered=read_ports(folder))
    assert again["--bus-port"] == first["--bus-port"]
    assert choose_ports(UpSettings(port=0), HERE, remembered={"--bus-port": taken})["--bus-port"] != taken


def test_a_damaged_memory_is_no_obstacle(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.ports.write_bytes(b"{")
    assert read_ports(folder) == {}


def test_a_public_port_that_was_handed_to_us_is_not_looked_for(taken: int) -> None:
    ports = choose_ports(UpSettings(port=8080), HERE, remembered={}, inherited_port=taken)
    assert ports["--port"] == taken
