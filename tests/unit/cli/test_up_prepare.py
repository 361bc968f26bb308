"""Folders, keys, certificates, locks, log files: made once, mended, or refused with one line."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from corral.cli.common.data_folder import DataFolder, lock_file
from corral.cli.up import machine, prepare
from corral.cli.up.logs import LastLines, RotatingFile
from corral.kit.certificates import expires_at, fingerprint, make_ca, subject_names
from corral.kit.errors import Conflict, Failed
from corral.kit.process import lock_holder

NOON = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)
NAMES = ("localhost", "127.0.0.1", "192.168.7.5")


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    made = DataFolder(tmp_path / "data")
    prepare.make_folders(made)
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_private(folder: DataFolder) -> None:
    assert {mode(each) for each in (folder.secrets, folder.controller, folder.worker, folder.logs)} == {0o700}
    # Under root, backends of another user pass through it to the worker's folder. Nobody can list it.
    assert mode(folder.root) == (0o711 if os.geteuid() == 0 else 0o700)


def test_a_folder_that_the_worker_opened_for_backends_stays_so(folder: DataFolder) -> None:
    folder.worker.chmod(0o711)
    prepare.make_folders(folder)
    assert mode(folder.worker) == 0o711
    folder.worker.chmod(0o755)
    prepare.make_folders(folder)
    assert mode(folder.worker) == 0o700


def test_a_key_is_made_once_and_closed_to_others(folder: DataFolder) -> None:
    first = prepare.make_key(folder.admin_key)
    assert first.startswith("ck_")
    assert mode(folder.admin_key) == 0o600
    folder.admin_key.chmod(0o644)
    assert prepare.make_key(folder.admin_key) == first
    assert mode(folder.admin_key) == 0o600


@pytest.mark.parametrize("content", [b"", b"hello", b"ck_short", b"ck_" + b"a" * 52 + b"\nck_two", b"\xff\xfe\x00"])
def test_a_file_that_holds_no_key_is_not_overwritten(folder: DataFolder, content: bytes) -> None:
    folder.admin_key.write_bytes(content)
    with pytest.raises(Failed, match="remove the file, and the next start creates a new key"):
        prepare.make_key(folder.admin_key)
    assert folder.admin_key.read_bytes() == content


def test_certificates_are_made_kept_and_renewed(folder: DataFolder) -> None:
    ca = prepare.make_certificates(folder, NAMES, NOON)
    first = folder.server_cert.read_text()
    assert subject_names(first) == set(NAMES)
    assert mode(folder.ca_key) == mode(folder.server_key) == 0o600

    prepare.make_certificates(folder, NAMES[:2], NOON)  # an address less needs no new certificate
    assert folder.server_cert.read_text() == first

    prepare.make_certificates(folder, (*NAMES, "10.0.0.9"), NOON)  # one more does
    second = folder.server_cert.read_text()
    assert "10.0.0.9" in subject_names(second)

    late = expires_at(second) - timedelta(days=29)
    again = prepare.make_certificates(folder, NAMES, late)
    assert folder.server_cert.read_text() != second
    assert again.fingerprint == ca.fingerprint == fingerprint(folder.ca_cert.read_text())


def test_a_server_certificate_that_does_not_fit_is_replaced(folder: DataFolder) -> None:
    prepare.make_certificates(folder, NAMES, NOON)
    key = folder.server_key.read_text()
    folder.server_key.write_text(folder.ca_key.read_text())  # a crash between the two writes
    prepare.make_certificates(folder, NAMES, NOON)
    assert folder.server_key.read_text() not in (key, folder.ca_key.read_text())

    other = make_ca("another", NOON)  # somebody restored an older CA
    folder.ca_cert.write_text(other.certificate_pem)
    folder.ca_key.write_text(other.key_pem)
    before = folder.server_cert.read_text()
    prepare.make_certificates(folder, NAMES, NOON)
    assert folder.server_cert.read_text() != before


def test_half_a_ca_is_never_replaced_by_a_new_one(folder: DataFolder) -> None:
    prepare.make_certificates(folder, NAMES, NOON)
    whole = folder.ca_cert.read_text()
    folder.ca_cert.unlink()
    with pytest.raises(Failed, match=r"ca\.crt is missing"):
        prepare.make_certificates(folder, NAMES, NOON)
    folder.ca_cert.write_text(whole)
    folder.ca_key.write_text("nonsense")
    with pytest.raises(Failed, match="cannot be used"):
        prepare.make_certificates(folder, NAMES, NOON)
    folder.ca_key.write_text(make_ca("x", NOON).key_pem)
    with pytest.raises(Failed, match="does not belong"):
        prepare.make_certificates(folder, NAMES, NOON)


def test_a_crash_while_the_ca_was_made_does_not_stand_in_the_way(folder: DataFolder) -> None:
    folder.secrets.mkdir(parents=True, exist_ok=True)
    folder.ca_key.write_text(make_ca("nobody has seen it", NOON).key_pem)
    ca = prepare.make_certificates(folder, NAMES, NOON)
    assert ca.certificate_pem == folder.ca_cert.read_text()
    assert prepare.make_certificates(folder, NAMES, NOON).fingerprint == ca.fingerprint


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (13, "another user owns it"),
        (28, "free some space"),
        (30, "choose a writable folder"),
        (20, "a file is in the place of a folder"),
    ],
)
def test_the_file_systems_refusals_say_what_to_do(tmp_path: Path, number: int, words: str) -> None:
    with pytest.raises(Failed, match=words), prepare.explain_os_errors(tmp_path):
        raise OSError(number, os.strerror(number), "/some/place")


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with (
        pytest.raises(Failed, match="a file is in the place of a folder"),
        prepare.explain_os_errors(tmp_path / "data"),
    ):
        prepare.make_folders(DataFolder(tmp_path / "data"))


def test_a_run_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare.make_run_folder(run)
    run.chmod(0o755)
    prepare.make_run_folder(run)
    assert mode(run) == 0o700
    link = tmp_path / "link"
    link.symlink_to(run)
    with pytest.raises(Failed, match="not a folder of this user"):
        prepare.make_run_folder(link)


def test_a_lock_is_held_once_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert lock_holder(path) is None
    with lock_file(path):
        assert lock_holder(path) == os.getpid()
        with pytest.raises(Conflict, match=rf"already runs with .* \(pid {os.getpid()}\)"), lock_file(path):
            pass
    assert lock_holder(path) is None
    with lock_file(path):
        pass


def test_a_port_in_use_names_the_flag_and_who_has_it() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(Failed, match=rf"port {port} is in use by .*pid {os.getpid()}.*--bus-port"):
            machine.check_port("127.0.0.1", port, "--bus-port")
        with pytest.raises(Failed, match="is in use"):
            machine.check_port("0.0.0.0", port, "--port")


def test_ports_that_were_let_go_are_free() -> None:
    with ExitStack() as held:
        others = [held.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(5)]
        ports = [other.getsockname()[1] for other in others]
    taken = 0
    for port in ports:
        try:
            machine.check_port("127.0.0.1", port, "--bus-port")
        except Failed:  # the system may have given it to somebody else meanwhile, but not all of them
            taken += 1
    assert taken < len(ports)


def test_an_address_that_is_not_ours() -> None:
    for host in ("192.0.2.77", "no-such-host.invalid"):
        with pytest.raises(Failed, match="not an address of this machine"):
            machine.check_port(host, 0, "--port")


def test_free_ports_differ_from_those_taken() -> None:
    first = machine.free_port("127.0.0.1")
    assert machine.free_port("127.0.0.1", [first]) != first


def test_the_machine_knows_its_names_and_addresses() -> None:
    assert {"127.0.0.1", "::1"} <= set(machine.addresses())
    assert "localhost" in machine.host_names()
    assert machine.main_address()
    assert machine.url_host("::1") == "[::1]"
    assert machine.loopback_of("0.0.0.0") == "127.0.0.1"
    assert machine.loopback_of("192.168.7.5") == "192.168.7.5"


def test_log_files_are_put_aside_by_size(tmp_path: Path) -> None:
    log = RotatingFile(tmp_path / "a.log", max_bytes=10, keep=3)
    for letter in "abcde":
        log.write(letter.encode() * 8)
    log.close()
    kept = {each.name: each.read_text()[0] for each in tmp_path.iterdir()}
    assert kept == {"a.log": "e", "a.log.1": "d", "a.log.2": "c"}


def test_a_full_disk_loses_lines_but_nothing_else() -> None:
    log = RotatingFile(Path("/dev/full"), max_bytes=10**9)
    log.write(b"hello")
    assert log.lost_bytes == 5
    log.close()


def test_the_tail_keeps_the_last_lines_however_they_are_cut() -> None:
    tail = LastLines(lines=2)
    assert tail.feed(b"one\ntw") == [b"one"]
    assert tail.feed(b"o\n\nthree\nhal") == [b"two", b"", b"three"]
    assert tail.lines() == ["two", "three", "hal"]
    tail.clear()
    assert tail.lines() == []
