"""Backends in words: what there is, what is installed where, what a request would do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from corral.cli.backends import text
from corral.client.resources.backends import AvailableBackend
from corral.contract.admin import MatrixCell, MatrixIntent, MatrixNode, MatrixRow
from corral.contract.messages.backends import NodeDrift, UpgradeInfo

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
ATTIC, SHED = MatrixNode("a", "attic", "healthy"), MatrixNode("s", "shed", "offline")


def entry(name: str, **more: Any) -> AvailableBackend:
    return AvailableBackend(name=name, **more)


def test_builds_for_one_machine_are_left_out_unless_asked_for_or_installed() -> None:
    entries = [
        entry("llama", is_meta=True, capabilities={"default": "cpu-llama", "nvidia": "localai@cuda-llama"}),
        entry("cpu-llama"),
        entry("cuda-llama", installed=True),
        entry("llama-development"),
        entry("whisper", description="Speech", tags=("audio",)),
    ]
    assert [each.name for each in text.matching(entries, "", builds=False)] == ["llama", "cuda-llama", "whisper"]
    assert [each.name for each in text.matching(entries, "", builds=True)] == [each.name for each in entries]
    assert [each.name for each in text.matching(entries, "AUDIO", builds=False)] == ["whisper"]
    assert [each.name for each in text.matching(entries, "speech", builds=False)] == ["whisper"]


def test_a_long_description_is_cut_to_one_line() -> None:
    shown = text.available_row(entry("x", description="many words\nin lines " * 20))[-1]
    assert shown.endswith("…")
    assert len(shown) == 70
    assert "\n" not in shown


def cell(version: str = "", **more: Any) -> MatrixCell:
    return MatrixCell(installed=True, version=version, **more)


def test_a_backend_in_one_row() -> None:
    row = MatrixRow("vllm", {"a": cell("1.0"), "s": cell("1.1")}, upgrade_available=True, available_version="1.2")
    assert text.matrix_row(row, [ATTIC, SHED]) == ("vllm", "1.0, 1.1", "2 of 2: attic, shed", "1.2", "")
    by_digest = MatrixRow("vllm", {"a": cell(digest="sha256:" + "ab" * 32)}, drift=True)
    assert text.matrix_row(by_digest, [ATTIC, SHED]) == (
        *("vllm", "sha256:abababababab", "1 of 2: attic", ""),
        "versions differ between nodes",
    )


def test_what_is_still_to_be_done_is_counted() -> None:
    waiting = MatrixCell(False, intent=MatrixIntent("install", "waiting", reason="node offline"))
    failing = MatrixCell(False, intent=MatrixIntent("install", "waiting", failures=2, reason="disk full"))
    row = MatrixRow("vllm", {"a": failing, "s": waiting})
    assert text.matrix_row(row, [ATTIC, SHED]) == ("vllm", "", "0 of 2", "", "failing on 1; installing on 1")


def test_one_node_of_a_backend_says_everything_about_it() -> None:
    one = cell(
        "1.0",
        digest="sha256:" + "ab" * 32,
        variant="cpu-vllm",
        installed_at="2026-11-15T11:00:00Z",
        outdated=True,
        drift=True,
        can_roll_back=True,
        intent=MatrixIntent("upgrade", "waiting", failures=1, reason="disk full", next_retry_at="2026-11-15T12:00:30Z"),
    )
    note = (
        "a newer version is available; differs from most nodes; can be rolled back; "
        "upgrading: disk full; next attempt in 30s"
    )
    assert text.show_row(ATTIC, one, NOON) == (
        *("attic", "healthy", "1.0", "cpu-vllm", "sha256:abababababab", "1h ago"),
        note,
    )
    row = MatrixRow("vllm", {"a": one}, upgrade_available=True, available_digest="sha256:" + "cd" * 32)
    assert text.node_row(row, one, NOON)[-2:] == ("sha256:cdcdcdcdcdcd", note)
    assert text.show_row(SHED, MatrixCell(True, is_system=True), NOON)[-1] == "installed by the system"


def test_scripts_get_the_nodes_by_name() -> None:
    row = MatrixRow("vllm", {"a": cell("1.0")})
    data = text.as_data(row, [ATTIC, SHED])
    assert data["backend"] == "vllm"
    nodes = data["nodes"]
    assert isinstance(nodes, list)
    assert [(each["node"], each["version"], each["installed"]) for each in nodes] == [("attic", "1.0", True)]


def test_upgrades_in_the_order_of_their_names() -> None:
    upgrades = {
        "vllm": UpgradeInfo("vllm", "1.0", "1.1", node_drift=(NodeDrift("a", "attic", "0.9"),)),
        "llama": UpgradeInfo("llama", "", "", "sha256:" + "ab" * 32, "sha256:" + "cd" * 32),
    }
    assert text.upgrade_rows(upgrades) == [
        ("llama", "sha256:abababababab", "sha256:cdcdcdcdcdcd", ""),
        ("vllm", "1.0", "1.1", "attic"),
    ]
