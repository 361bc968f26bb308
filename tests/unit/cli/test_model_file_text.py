"""What `corral models files` and `gc` print, and the bars of transfers."""

from __future__ import annotations

import msgspec
import pytest

from corral.cli.models.files import collected_rows, file_row, node_row, part_of
from corral.cli.operations.progress import node_bar
from corral.cli.operations.text import eta, line, sources
from corral.cli.operations.text import node_row as operation_node_row
from corral.contract.admin import OperationNodeView
from corral.contract.catalogue import CollectedOn, CollectedView, ModelFileView, NodeFilesView
from corral.contract.messages.staging import RemovedFiles

MOVING = OperationNodeView(
    "n1",
    "attic",
    "downloading",
    50.0,
    file_name="w.gguf",
    phase="downloading",
    current_bytes=512,
    total_bytes=1024,
    rate=64.0,
    eta_s=8.0,
    sources={"controller": 128, "barn": 384},
)


def test_a_moving_transfer_shows_its_rate_its_sources_and_the_time_left() -> None:
    assert line(MOVING) == (
        "attic: downloading 50% 512 B / 1.0 KiB 64 B/s 0:08 left from barn 75%, controller 25% (w.gguf)"
    )
    bar = node_bar(MOVING, "attic")
    assert (bar.rate, bar.note) == ("64 B/s", "0:08 left, from barn 75%, controller 25%, w.gguf")


def test_a_source_that_sent_wrong_data_is_named() -> None:
    moving = msgspec.structs.replace(MOVING, bad_sources=("cellar", "loft"))
    assert line(moving) == (
        "attic: downloading 50% 512 B / 1.0 KiB 64 B/s 0:08 left from barn 75%, controller 25% "
        "wrong data from cellar, loft (w.gguf)"
    )
    assert node_bar(moving, "attic").note.endswith("controller 25%, wrong data from cellar, loft, w.gguf")
    assert operation_node_row(moving)[-1] == "w.gguf; wrong data from cellar, loft"
    ended = OperationNodeView(
        "n1", "attic", "success", 100.0, note="1.0 KiB from barn; wrong data from loft", bad_sources=("loft",)
    )
    assert operation_node_row(ended)[-1] == "1.0 KiB from barn; wrong data from loft"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, ""), (8.4, "0:08 left"), (125.0, "2:05 left"), (3700, "1:01:40 left")]
)
def test_the_time_that_is_left(seconds: float, text: str) -> None:
    assert eta(OperationNodeView("n", "n", "downloading", 1.0, eta_s=seconds)) == text


def test_many_sources_are_cut_to_the_largest() -> None:
    many = OperationNodeView("n", "n", "downloading", 1.0, sources={f"n{size}": size for size in (10, 20, 30, 40)})
    assert sources(many) == "from n40 40%, n30 30%, n20 20% and others"


def test_rows_of_files_and_nodes() -> None:
    file = ModelFileView("w.gguf", 2048, "sha256:" + "a" * 64, "https://there/w", 1024)
    assert file_row(file) == ("w.gguf", "2.0 KiB", "a" * 12, "50%", "https://there/w")
    assert file_row(file, full=True)[2] == "a" * 64
    uploaded = ModelFileView("w.gguf", 2048, "sha256:" + "a" * 64, "upload://" + "a" * 64 + "/w.gguf", 2048)
    assert file_row(uploaded)[-1] == "uploaded"
    assert [part_of(have, 100) for have in (0, 99, 100)] == ["no", "99%", "yes"]
    node = NodeFilesView("n1", "attic", "partial", 1024, 2048, 4096, (1024, 0))
    assert node_row(node, 2) == ("attic", "partial", "1 of 2", "1.0 KiB / 2.0 KiB", "4.0 KiB", "")
    away = NodeFilesView("n1", "attic", "unknown", 0, 2048, reason="the node is offline")
    assert node_row(away, 2) == ("attic", "unknown", "", "", "", "the node is offline")


def test_rows_of_a_cleanup() -> None:
    removed = RemovedFiles("m/abc", 2, 2048, "no model needs these files")
    view = CollectedView(
        False, 2048, (CollectedOn("controller", "controller", (), 0), CollectedOn("n", "attic", (removed,), 2048))
    )
    assert list(collected_rows(view)) == [("attic", "m/abc", "2", "2.0 KiB", "no model needs these files")]
