"""`corral secrets` and the settings of `corral bus`: files that fit, made once, one line for a fault."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

from corral.cli.common.data_folder import SecretsFolder
from corral.cli.main import main
from corral.cli.nodes.bus_server import BusRoleSettings
from corral.controller.wiring.access import ensure_key_file, load_ca
from corral.kit.certificates import subject_names
from corral.kit.settings import BadSettings, read_settings


def create(folder: Path, *words: str) -> int:
    return main(["secrets", "create", str(folder), *words])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_issued(certificate: Path, key: Path, ca: Path) -> bool:
    found = load_pem_x509_certificate(certificate.read_bytes())
    found.verify_directly_issued_by(load_pem_x509_certificate(ca.read_bytes()))
    private = load_pem_private_key(key.read_bytes(), password=None)
    return private.public_key() == found.public_key()


def test_everything_that_controllers_bus_and_gateways_need(tmp_path: Path) -> None:
    made, gateway = SecretsFolder(tmp_path / "made"), SecretsFolder(tmp_path / "gateway")
    names = ("--name", "fleet.example", "--name", "10.0.0.5")
    assert create(made.path, "--gateway-folder", str(gateway.path), *names) == 0
    ca = load_ca(made.ca_cert, made.ca_key)
    assert ca is not None
    assert subject_names(made.server_cert.read_text()) == {"fleet.example", "10.0.0.5", "localhost", "127.0.0.1"}
    assert is_issued(made.server_cert, made.server_key, made.ca_cert)
    assert ensure_key_file(made.admin_key) != ensure_key_file(made.gateway_key)
    assert {path.name for path in gateway.path.iterdir()} == {"gateway.key", "ca.crt", "server.crt", "server.key"}
    assert gateway.gateway_key.read_bytes() == made.gateway_key.read_bytes()
    for path in (*made.path.rglob("*"), *gateway.path.rglob("*")):
        private = path.is_dir() or path.suffix in (".key", ".seed")
        assert not private or not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    assert stat.S_IMODE(made.bus_keys.stat().st_mode) == 0o700


def test_a_second_run_keeps_all_and_a_new_name_is_added_to_the_others(tmp_path: Path) -> None:
    made = SecretsFolder(tmp_path / "made")
    assert create(made.path, "--name", "one") == 0
    before = content(made.path)
    assert create(made.path, "--name", "one") == 0
    assert content(made.path) == before
    assert create(made.path, "--name", "two") == 0
    assert subject_names(made.server_cert.read_text()) == {"one", "two", "localhost", "127.0.0.1"}
    changed = {name for name, data in content(made.path).items() if before[name] != data}
    assert changed == {"server.crt", "server.key"}


def test_a_certificate_for_one_more_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, pod = SecretsFolder(tmp_path / "made"), SecretsFolder(tmp_path / "pod")
    assert create(made.path, "--name", "one") == 0
    capsys.readouterr()
    words = ["secrets", "certificate", str(pod.path), "--ca", str(made.path), "--name", "10.1.2.3", "--json"]
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["names"] == ["10.1.2.3", "127.0.0.1", "localhost"]
    assert shown["ca"].startswith("sha256:")
    assert is_issued(pod.server_cert, pod.server_key, made.ca_cert)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("create", "{}/new"), "--name"),
        (("create", "{}/new", "--name", "a b"), "'a b' is not a host name or an address"),
        (("create", "{}/file/new", "--name", "a"), "Not a directory: choose a folder that user"),
        (("certificate", "{}/new", "--ca", "{}/nowhere", "--name", "a"), "create them with `corral secrets create`"),
    ],
)
def test_faults_in_one_line(
    words: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["secrets", *(word.replace("{}", str(tmp_path)) for word in words)]) in (1, 2)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert line in told[0]


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        ({}, "--bus-keys (or CORRAL_BUS_KEYS) is required"),
        ({"CORRAL_BUS_KEYS": "/k", "CORRAL_TLS_CERT": __file__}, "--tls-cert and --tls-key must be given together"),
        ({"CORRAL_BUS_KEYS": "/k", "CORRAL_PORT": "99999"}, "CORRAL_PORT: 99999 is not a port"),
    ],
)
def test_settings_of_the_bus_that_cannot_be_used(env: dict[str, str], fault: str) -> None:
    with pytest.raises(BadSettings) as told:
        read_settings(BusRoleSettings, flags={}, env=env)
    assert fault in str(told.value)


def test_a_bus_without_its_certificate_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bus", "--bus-keys", f"{tmp_path}/keys", "--tls-cert", "/none", "--tls-key", __file__]
    assert main(words) == 2
    assert capsys.readouterr().err == "corral: --tls-cert: there is no file /none\n"
    assert list(tmp_path.iterdir()) == []
