"""Under which names a backend is there, on our workers and on LocalAI's."""

from __future__ import annotations

from corral.contract.messages.backends import NodeBackend
from corral.controller.inventory.installed import (
    Installed,
    concrete_name,
    find_installed,
    names_in,
    only_called,
    previous_digests,
)

META = NodeBackend("llama-cpp", False, True, meta_backend_for="cpu-llama-cpp", installed_at="monday")
BUILD = NodeBackend(
    "cpu-llama-cpp",
    False,
    False,
    alias="llama-cpp",
    digest="sha256:1",
    version="2",
    installed_at="tuesday",
    previous=("sha256:0",),
    fetched=("sha256:2",),
)
SYSTEM = NodeBackend("piper", True, False)
ROWS = (META, BUILD, SYSTEM)
THERE = Installed("sha256:1", "tuesday", "2", beside=("sha256:2", "sha256:0"))


def test_by_its_own_name() -> None:
    assert find_installed(ROWS, "cpu-llama-cpp") == Installed(
        "sha256:1", "tuesday", "2", beside=("sha256:2", "sha256:0")
    )
    assert find_installed(ROWS, "piper") == Installed(system=True)
    assert find_installed(ROWS, "vllm") is None
    assert find_installed((), "") is None


def test_as_what_a_meta_stands_for() -> None:
    assert find_installed(ROWS, "llama-cpp") == THERE
    assert find_installed((META, SYSTEM), "llama-cpp") is None


def test_a_meta_of_a_worker_that_does_not_say_what_it_stands_for() -> None:
    silent = NodeBackend("llama-cpp", False, True, installed_at="monday")
    assert find_installed((silent, BUILD), "llama-cpp", "cpu-llama-cpp") == Installed(
        "sha256:1", "tuesday", "2", beside=("sha256:2", "sha256:0")
    )
    assert find_installed((silent, BUILD), "llama-cpp", "cuda-llama-cpp") == Installed("", "monday")


def test_by_alias() -> None:
    assert find_installed((BUILD,), "llama-cpp") == Installed(
        "sha256:1", "tuesday", "2", beside=("sha256:2", "sha256:0")
    )


def test_of_several_with_that_alias_the_one_we_mean() -> None:
    other = NodeBackend("cuda-llama-cpp", False, False, alias="llama-cpp", digest="sha256:7")
    assert find_installed((BUILD, other), "llama-cpp", "cuda-llama-cpp") == Installed("sha256:7")
    assert find_installed((other, BUILD), "llama-cpp", "vulkan-llama-cpp") == Installed("sha256:7")


def test_what_is_ours_wins_over_the_systems() -> None:
    ours = NodeBackend("piper", False, False, digest="sha256:9")
    assert find_installed((SYSTEM, ours), "piper") == Installed("sha256:9")


def test_names_and_earlier_versions() -> None:
    assert names_in(ROWS) == {"llama-cpp", "cpu-llama-cpp", "piper"}
    assert previous_digests(ROWS, "llama-cpp") == ("sha256:0",)
    assert previous_digests(ROWS, "piper") == ()
    assert previous_digests(ROWS, "vllm") == ()
    assert concrete_name(ROWS, "llama-cpp") == "cpu-llama-cpp"
    assert concrete_name(ROWS, "vllm") == "vllm"


def test_a_name_that_several_builds_share_is_no_ones_own() -> None:
    one, two = (NodeBackend(name, False, False, alias="shared") for name in ("one", "two"))
    other = NodeBackend("other", False, False, alias="else")
    rows = (one, two, other, SYSTEM)
    assert only_called(rows, "shared") == {"one", "two"}
    assert only_called(rows, "else") == {"other"}
    for name in ("one", "piper", ""):
        assert only_called(rows, name) == frozenset()
    assert only_called((*rows, NodeBackend("shared", False, True, meta_backend_for="one")), "shared") == frozenset()
    assert only_called((one, NodeBackend("two", True, False, alias="shared")), "shared") == {"one"}
