"""Where the files of a model are: one line per node, with what moves and from where."""

from __future__ import annotations

from corral.contract.catalogue import ModelFilesView, ModelFileView, NodeFilesView
from corral.controller.web.model_files import NODES_SHOWN, files_table, node_files_table
from tests.support.operation_views import on, operation

MIB = 2**20
WEIGHTS = ModelFileView("w.gguf", 8 * MIB, "sha256:aa", "https://hub/w.gguf", 8 * MIB)
OTHER = ModelFileView("t.json", 0, "", "", 0)


def copy(name: str, state: str, have: int = 0, **more: object) -> NodeFilesView:
    return NodeFilesView(f"id-{name}", name, state, have, 8 * MIB, **more)  # type: ignore[arg-type]


def view(*nodes: NodeFilesView) -> ModelFilesView:
    return ModelFilesView("m", (WEIGHTS, OTHER), nodes, 8 * MIB)


def test_an_uploaded_file_has_no_source_to_open() -> None:
    uploaded = ModelFileView("w.gguf", MIB, "sha256:aa", "upload://" + "a" * 64 + "/w.gguf", MIB)
    table = files_table(ModelFilesView("m", (uploaded, WEIGHTS), (), 9 * MIB), ())
    assert [file.source for file in table.files] == ["uploaded", "https://hub/w.gguf"]


def test_each_node_is_listed_with_what_it_has() -> None:
    table = files_table(
        view(
            copy("attic", "whole", 8 * MIB, free_bytes=3 * 2**30),
            copy("barn", "partial", 2 * MIB),
            copy("byre", "none"),
            copy("cellar", "unknown", reason="the node is offline"),
        ),
        (),
    )
    assert [(line.node, line.pill, line.words, line.percent, line.amount) for line in table.nodes] == [
        ("barn", "waiting", "incomplete", 25, "2 / 8 MiB"),
        ("byre", "cold", "none", 0, "0 / 8 MiB"),
        ("cellar", "cold", "unknown", None, ""),
        ("attic", "ready", "complete", 100, "8 / 8 MiB"),
    ]
    assert (table.complete, table.size, table.nodes[3].free, table.nodes[2].note) == (
        1,
        "8 MiB",
        "3 GiB free",
        "the node is offline",
    )
    assert [(file.path, file.size, file.on_controller) for file in table.files] == [
        ("w.gguf", "8 MiB", True),
        ("t.json", "", False),
    ]


def test_a_node_that_receives_names_its_sources() -> None:
    receiving = on(
        "barn",
        current_bytes=4 * MIB,
        total_bytes=8 * MIB,
        rate=2.0 * MIB,
        sources={"attic": 3 * MIB, "controller": MIB},
    )
    waiting, failed = on("byre", "queued"), on("cellar", "error", error="no space")
    stage = operation(receiving, waiting, failed, id="staging:m", backend="m", kind="stage")
    old = operation(
        on("byre", current_bytes=MIB, total_bytes=8 * MIB), id="staging:m", backend="m", kind="stage", finished_at="now"
    )
    other = operation(on("byre", current_bytes=MIB, total_bytes=8 * MIB), id="staging:n", backend="n", kind="stage")
    nodes = (copy("byre", "none"), copy("barn", "partial", 2 * MIB), copy("cellar", "none"))
    barn, byre, cellar = files_table(view(*nodes), (stage, old, other)).nodes
    assert (barn.node, barn.words, barn.percent, barn.amount, barn.sources) == (
        "barn",
        "receiving",
        50,
        "4 / 8 MiB, 2 MiB/s",
        "from attic 75 %, controller 25 %",
    )
    assert (byre.node, byre.words, byre.sources) == ("byre", "none", "")
    assert (cellar.node, cellar.words) == ("cellar", "none")


def test_a_large_fleet_is_cut_where_nodes_are_complete() -> None:
    nodes = [copy(f"n{number}", "whole", 8 * MIB) for number in range(NODES_SHOWN)]
    table = files_table(view(*nodes, copy("z", "none")), ())
    assert (table.nodes[0].node, len(table.nodes), table.nodes_more, table.complete) == ("z", NODES_SHOWN, 1, 100)


def test_a_node_lists_the_models_of_which_it_has_something() -> None:
    held = {
        "org/m": copy("barn", "whole", 8 * MIB, free_bytes=MIB),
        "n": copy("barn", "none"),
        "o": copy("barn", "none"),
    }
    receiving = on("barn", "downloading", current_bytes=2 * MIB, total_bytes=8 * MIB)
    table = node_files_table(held, (operation(receiving, id="staging:o", backend="o", kind="staging"),))
    assert [(line.model, line.href, line.copy.words, line.copy.percent) for line in table.models] == [
        ("o", "/models/o", "receiving", 25),
        ("org/m", "/models/org/m", "complete", 100),
    ]
    assert (table.note, table.free, table.models_more) == ("", "1 MiB free", 0)
    silent = node_files_table({"m": copy("barn", "unknown", reason="the node is offline")}, ())
    assert (silent.note, silent.models) == ("the node is offline", ())
