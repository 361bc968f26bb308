"""A model's file that workers bring to each other: most bytes come from peers, a killed worker resumes, a worker with
damaged bytes is named, and the space is free again after the model is deleted."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_files_of_models import disk_bytes
from tests.support.fleet import Fleet
from tests.support.object_storage import ObjectStorage, open_object_storage
from tests.support.waiting import wait_for

CHUNK = 4 << 20
CONTENT = b"GGUF" + os.urandom(12 * CHUNK - 4)  # whole chunks: what is kept can be counted
NAMES = ("attic", "barn", "cellar")
DOWNLOAD = ("--max-download", "5MiB")  # so that there is a middle to be killed in


@contextlib.contextmanager
def open_fleet(root: Path, **env: str) -> Iterator[Fleet]:
    """A controller with a model of one file, and three workers that have nothing of it yet."""
    models = root / "data" / "controller" / "models"
    models.mkdir(parents=True)
    (models / "ours.gguf").write_bytes(CONTENT)
    fleet = Fleet(root, "--no-worker", CORRAL_STALE_AFTER="10s", **env)
    try:
        fleet.start()
        for name in NAMES:
            fleet.join(name, token=fleet.token("--pre-approved"), options=DOWNLOAD)
        for name in NAMES:
            fleet.wait_status(name, "healthy")
        definition = root / "own.yaml"
        definition.write_text("name: own\nbackend: mock\nparameters: {model: ours.gguf}\n")
        assert fleet.cli("models", "install", "--file", str(definition), "--no-fetch").returncode == 0
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with open_fleet(tmp_path) as fleet:
        yield fleet


def rows(fleet: Fleet, operation: str) -> dict[str, dict[str, Any]]:
    shown = fleet.cli("ops", "show", operation, "--json")
    assert shown.returncode == 0, shown.stderr
    return {row["node_name"]: row for row in json.loads(shown.stdout)["nodes"]}


def stage(fleet: Fleet, *options: str) -> str:
    """The operation, while it runs."""
    begun = fleet.cli("models", "stage", "own", "--detach", "--json", *options)
    assert begun.returncode in (0, 3), begun.stderr
    (view,) = json.loads(begun.stdout)
    return str(view["job_id"])


def partial_bytes(fleet: Fleet, name: str) -> int:
    """The size of the verified chunks of a download on the worker's disk."""
    found = 0
    for bitmap in (fleet.root / f"worker-{name}" / "models" / ".blobs" / "incoming").glob("*.have"):
        found += sum(byte.bit_count() for byte in bitmap.read_bytes().partition(b"\n")[2]) * CHUNK
    return found


def is_staged(fleet: Fleet, name: str) -> bool:
    found = list((fleet.root / f"worker-{name}" / "models" / "own").rglob("ours.gguf"))
    return bool(found) and found[0].read_bytes() == CONTENT


def damage_blob(fleet: Fleet, name: str) -> None:
    """Other bytes of the same size, on the disk behind the worker's back."""
    blobs = fleet.root / f"worker-{name}" / "models" / ".blobs" / "sha256"
    (blob,) = (path for path in blobs.iterdir() if path.stat().st_size == len(CONTENT))
    blob.chmod(0o600)
    blob.write_bytes(os.urandom(len(CONTENT)))


def test_a_file_reaches_every_worker_mostly_from_its_peers(fleet: Fleet) -> None:
    operation = stage(fleet)
    wait_for(lambda: partial_bytes(fleet, "barn") >= 3 * CHUNK, "some chunks on barn")
    moving = fleet.cli("ops", "show", operation).stdout
    assert re.search(r"attic +downloading +\d+% .* / 48\.0 MiB", moving), moving
    fleet.workers["barn-0"].kill()
    kept = partial_bytes(fleet, "barn")
    fleet.join("barn", options=DOWNLOAD)
    watched = fleet.cli("ops", "watch", operation, timeout_s=120)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert "from " in watched.stdout
    assert all(is_staged(fleet, name) for name in NAMES)
    sources = {name: row["sources"] for name, row in rows(fleet, operation).items()}
    from_controller = sum(each.get("controller", 0) for each in sources.values())
    from_peers = sum(sum(each.values()) for each in sources.values()) - from_controller
    assert from_peers > from_controller, sources
    # Counted since the worker is back: it kept its chunks, at most those of open requests were sent again.
    assert sum(sources["barn"].values()) <= len(CONTENT) - kept, (sources, kept)

    damage_blob(fleet, "attic")
    fleet.join("loft", token=fleet.token("--pre-approved"))
    fleet.wait_status("loft", "healthy")
    late = stage(fleet, "--node", "loft")
    assert fleet.cli("ops", "watch", late, timeout_s=120).returncode == 0
    assert is_staged(fleet, "loft")
    (row,) = rows(fleet, late).values()
    assert row["bad_sources"] == ["attic"]
    assert "attic" not in row["sources"]
    assert row["note"].endswith("; wrong data from attic")
    assert "wrong data from attic" in fleet.cli("ops", "show", late).stdout

    delete_and_free(fleet, *NAMES, "loft")


def storage_env(storage: ObjectStorage) -> dict[str, str]:
    keys = {"CORRAL_STORAGE_ACCESS_KEY": "access", "CORRAL_STORAGE_SECRET_KEY": "secret"}
    return {"CORRAL_STORAGE_URL": storage.url, **keys}


@pytest.mark.long
def test_the_same_with_an_object_storage(tmp_path: Path) -> None:
    with open_object_storage() as storage, open_fleet(tmp_path, **storage_env(storage)) as fleet:
        operation = stage(fleet)
        wait_for(lambda: partial_bytes(fleet, "barn") >= 2 * CHUNK, "some chunks on barn")
        fleet.workers["barn-0"].kill()
        kept = partial_bytes(fleet, "barn")
        fleet.join("barn", options=DOWNLOAD)
        watched = fleet.cli("ops", "watch", operation, timeout_s=120)
        assert watched.returncode == 0, watched.stdout + watched.stderr
        assert all(is_staged(fleet, name) for name in NAMES)
        sources = {name: row["sources"] for name, row in rows(fleet, operation).items()}
        received = Counter[str]()
        for each in sources.values():
            received.update(each)
        assert received["object storage"] > 0, sources
        assert sum(received[name] for name in NAMES) > received["controller"], sources
        assert sum(sources["barn"].values()) <= len(CONTENT) - kept, (sources, kept)
        assert len(storage.list_keys()) == 1
        delete_and_free(fleet, *NAMES)


def delete_and_free(fleet: Fleet, *names: str) -> None:
    """The model goes, and with it the space of its files on every machine."""
    assert fleet.cli("models", "delete", "own", "--yes").returncode == 0
    for name in names:  # what was used within the last half minute stays
        for record in (fleet.root / f"worker-{name}" / "models" / ".blobs" / "sets").glob("*.json"):
            os.utime(record, (1.0, 1.0))
    freed = fleet.cli("models", "gc")
    assert freed.returncode == 0, freed.stderr

    def is_free() -> bool:
        return all(disk_bytes(fleet.root / f"worker-{name}" / "models") < 1000 for name in names)

    wait_for(is_free, "the disk of all workers")
    assert disk_bytes(fleet.root / "data" / "controller" / "blobs" / "sha256") == 0
