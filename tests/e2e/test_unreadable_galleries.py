"""A gallery that cannot be reached is said where people look: the commands, `doctor` and the page."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.fleet import PATIENT, Fleet, http

pytestmark = pytest.mark.timeout(180)
WHY = "(http://127.0.0.1:9/index.yaml: Connection refused)"
NOTICE = f"The gallery farm cannot be read {WHY}."
NEXT_STEP = "What to check: `corral doctor`."


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    gallery = json.dumps([{"name": "farm", "url": "http://127.0.0.1:9/index.yaml"}])
    fleet = Fleet(
        tmp_path_factory.mktemp("unread"),
        "--no-worker",
        **PATIENT | {"CORRAL_GALLERIES": gallery, "CORRAL_MODEL_GALLERIES": gallery},
    )
    try:
        fleet.start()
        fleet.join_line()
        yield fleet
    finally:
        fleet.close()


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (("models", "available", "zzz"), "No gallery that can be read has an entry that matches."),
        (("backends", "available", "zzz"), "No gallery that can be read has an entry that matches."),
        (("backends", "upgrades"), "Every backend is up to date with the galleries that can be read."),
        (("backends", "upgrade", "--outdated"), "Every backend is up to date with the galleries that can be read."),
        (("backends", "upgrades", "--check"), "Every backend is up to date with the galleries that can be read."),
    ],
)
def test_commands_name_a_gallery_that_cannot_be_read(fleet: Fleet, words: tuple[str, ...], last: str) -> None:
    ran = fleet.cli(*words)
    assert (ran.returncode, ran.stdout, ran.stderr.splitlines()) == (0, "", [NOTICE, NEXT_STEP, last])


def test_doctor_and_the_page_name_a_gallery_that_cannot_be_read(fleet: Fleet) -> None:
    ran = fleet.cli("doctor", "--json")
    found = [each for each in json.loads(ran.stdout) if each["about"] == "gallery"]
    assert [(each["level"], each["seen"]) for each in found] == [
        ("warn", f"backends: The gallery farm cannot be read {WHY}"),
        ("warn", f"models: The gallery farm cannot be read {WHY}"),
    ]
    assert "--galleries" in found[0]["fix"]
    assert "No problems found" not in ran.stderr
    told = http("GET", f"{fleet.url}/api/cluster", key=fleet.key).json()
    assert told["notices"] == [NOTICE]
    for page in ("/page/overview", "/page/models", "/page/backends"):
        shown = http("GET", f"{fleet.url}{page}", key=fleet.key).body.decode()
        assert NOTICE in shown, page
