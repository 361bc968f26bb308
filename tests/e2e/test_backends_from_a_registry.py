"""Three machines, a real registry behind a line that is slow and breaks, and an image for two platforms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.backend_images import gallery_of, line_to, mock_image, openai_entry
from tests.support.fleet import PATIENT, Fleet
from tests.support.grown_fleet import ask_ingress, grown_fleet, order
from tests.support.image_registry import ImageRegistry, push_image, registry
from tests.support.waiting import wait_for

__all__ = ["registry"]

WORKERS = ("barn", "byre")
NOISE_BYTES = 3_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry-fleet")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    with grown_fleet(folder, *WORKERS, env=gallery_of(folder / "galleries") | PATIENT) as fleet:
        yield fleet


def have(fleet: Fleet, backend: str) -> set[str]:
    """The nodes that list it themselves."""
    listed = {node: order(fleet, node, "backend.list", {})["backends"] or () for node in fleet.nodes()}
    return {node for node, rows in listed.items() if any(row["name"] == backend for row in rows)}


def test_an_image_arrives_everywhere_over_a_line_that_breaks_and_answers(
    fleet: Fleet, folder: Path, registry: ImageRegistry
) -> None:
    image = mock_image("one", noise_bytes=NOISE_BYTES)
    push_image(registry.url, "demo/mock", "1", image)
    with line_to(registry.port) as line:
        gallery_of(folder / "galleries", openai_entry("farm-mock", f"oci://{line.host}/demo/mock:1"))
        line.at(3_000_000)
        line.cut_after(*[1_000_000] * 4)
        ran = fleet.cli("backends", "install", "farm-mock", "--json", timeout_s=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        size = sum(map(len, image.layers["linux/amd64"]))
        assert NOISE_BYTES < line.passed <= 1.02 * size  # three nodes, one download: by the controller
    (operation,) = json.loads(ran.stdout)
    assert {row["status"] for row in operation["nodes"]} == {"success"}
    assert len(fleet.nodes()) == 3
    assert have(fleet, "farm-mock") == set(fleet.nodes())

    started = order(
        fleet,
        "barn",
        "replica.start",
        {"op_id": "start-1", "attempt": 1, "process_id": "p-1", "model": "m", "replica": 0, "backend": "farm-mock"},
        timeout_s=60,
    )
    assert started["success"], started
    asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    answer = wait_for(
        lambda: ask_ingress(fleet, "barn", "POST", "/replicas/p-1/v1/chat/completions", asked), "answer of the replica"
    )
    assert answer.status == 200, answer.body
    assert "one" in answer.json()["choices"][0]["message"]["content"]
    stopped = order(fleet, "barn", "replica.stop", {"process_id": "p-1", "op_id": "stop-1", "attempt": 1})
    assert stopped["success"], stopped
