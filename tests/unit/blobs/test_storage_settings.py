"""The settings of the object storage: LocalAI's names start a Corral worker, and half a key pair starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corral.blobs.storage_settings import StorageSettings
from corral.controller.settings import ControllerSettings
from corral.kit.settings import BadSettings, read_settings, shown
from corral.worker.settings import WorkerSettings


def read(**env: str) -> StorageSettings:
    return read_settings(StorageSettings, flags={}, env=env)


def test_there_is_no_object_storage_by_default() -> None:
    settings = read()
    assert not settings.is_configured
    assert (settings.storage_bucket, settings.storage_region) == ("localai", "us-east-1")


@pytest.mark.parametrize("prefix", ["CORRAL", "LOCALAI"])
def test_both_spellings_of_the_variables(prefix: str) -> None:
    given = {
        f"{prefix}_STORAGE_URL": "http://storage:9000/",
        f"{prefix}_STORAGE_BUCKET": "models",
        f"{prefix}_STORAGE_REGION": "eu-central-1",
        f"{prefix}_STORAGE_ACCESS_KEY": "access",
        f"{prefix}_STORAGE_SECRET_KEY": "secret",
    }
    settings = read(**given)
    assert settings == StorageSettings("http://storage:9000", "models", "eu-central-1", "access", "secret")
    assert settings.is_configured
    assert "secret" not in shown(settings).values()


@pytest.mark.parametrize("name", ["LOCALAI_STORAGE_ACCESS_KEY", "CORRAL_STORAGE_SECRET_KEY"])
@pytest.mark.parametrize("settings", [StorageSettings, ControllerSettings, WorkerSettings])
def test_half_a_key_pair_is_refused(settings: type[Any], name: str) -> None:
    with pytest.raises(BadSettings, match="storage-access-key and storage-secret-key come together"):
        read_settings(settings, flags={}, env={"CORRAL_STORAGE_URL": "http://storage:9000", name: "half"})


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("storage:9000", "not a URL"),
        ("ftp://storage", "not a URL"),
        ("http://", "not a URL"),
        ("http://storage:99999", "not a URL"),
        ("http://me:pw@storage", "give --storage-access-key"),
        ("http://storage/?x=1", "query"),
    ],
)
def test_a_url_that_cannot_be_used(url: str, why: str) -> None:
    with pytest.raises(BadSettings, match=why) as raised:
        read(CORRAL_STORAGE_URL=url)
    assert "pw" not in str(raised.value)


def test_a_bucket_is_one_name(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="not the name of a bucket"):
        read(CORRAL_STORAGE_BUCKET="a/b")
    with pytest.raises(BadSettings, match="storage-ca: there is no file"):
        read(CORRAL_STORAGE_CA=str(tmp_path / "none.pem"))
