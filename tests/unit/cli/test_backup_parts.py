"""Which files of a data folder a backup has, with secrets and without."""

from __future__ import annotations

from pathlib import Path

from corral.cli.backup import parts
from corral.cli.common.data_folder import DataFolder

SECRETS = {
    *("secrets/admin.key", "secrets/gateway.key", "secrets/ca.crt", "secrets/ca.key"),
    *("secrets/bus/operator.seed", "secrets/bus/account.seed"),
    *("worker/identity.json", "worker/ingress.key", "worker/ingress.crt"),
}
PLAIN = {"ports.json", "controller/models/chat.yaml", "controller/galleries/own.yml"}
OTHERS = {
    *("secrets/server.key", "secrets/server.crt", "secrets/worker.token", "lock", "logs/up.log", "worker/lock"),
    *("controller/corral.db", "controller/instance-id", "controller/models/weights.gguf", "controller/blobs/x"),
    *("controller/models/.chat.yaml.tmp.yaml", "bus/nats.conf", "worker/settings.json"),
}
LOGIN = b"uri: https://anna:s3cret@models.example/x\n"


def filled(root: Path) -> DataFolder:
    for name in SECRETS | PLAIN | OTHERS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(LOGIN)
    return DataFolder(root)


def test_with_secrets(tmp_path: Path) -> None:
    found = parts.read_parts(filled(tmp_path), with_secrets=True)
    assert {parts.place_of(name) for name in found} == SECRETS | PLAIN
    assert set(found.values()) == {LOGIN}
    assert all(map(parts.is_known, found))


def test_without_secrets_there_is_no_login_either(tmp_path: Path) -> None:
    found = parts.read_parts(filled(tmp_path), with_secrets=False)
    assert {parts.place_of(name) for name in found} == PLAIN
    assert set(found.values()) == {b"uri: https://***@models.example/x\n"}


def test_a_folder_of_nothing(tmp_path: Path) -> None:
    assert parts.read_parts(DataFolder(tmp_path / "none"), with_secrets=True) == {}


def test_what_a_folder_keeps() -> None:
    assert parts.is_kept("ports.json")
    assert parts.is_kept("worker/identity.json")
    assert not parts.is_kept("secrets/admin.key")
    assert parts.is_of_worker("worker/identity.json")
    assert not parts.is_of_worker("controller/models/worker.yaml")


def test_the_machine_is_the_same_each_time_and_not_its_id() -> None:
    assert parts.machine_id() == parts.machine_id()
    known = Path("/etc/machine-id")
    assert not known.exists() or known.read_text().strip() not in parts.machine_id()
